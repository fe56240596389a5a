"""The jobs that claims run: the digits with networks of several depths, and a small GPT."""

from __future__ import annotations

DIGITS = """[job]
name = "claim"
task = "{task}"
stop = {{ {stop} }}
[inner]
name = "none"
[optimizer]
name = "sgd"
[servers]
count = 1
[workers]
count = {workers}
batch_size = {batch}
threads = 1
[data]
portion_batches = {portion}
[evaluation]
{evaluation}
[checkpoints]
every_s = 0.0
"""

MLP = '''"""The digits with other networks, and other measures."""

import torch
from torch import nn
from train import Digits


class Mlp(Digits):
    def __init__(self, *hidden):
        super().__init__()
        self.widths = (64, *hidden, 10)

    def model(self):
        layers = []
        for fan_in, fan_out in zip(self.widths, self.widths[1:]):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def evaluate(self, model):
        scores = model(self.test_images)
        right = (scores.argmax(1) == self.test_labels).float()
        return {
            "accuracy": right.mean(),
            "test_loss": nn.functional.cross_entropy(scores, self.test_labels),
        }


linear, one, two = Mlp(), Mlp(64), Mlp(64, 64)
'''

GPT = """[job]
name = "claim"
task = "small.py:task"
stop = {{ {stop} }}
[inner]
name = "none"
[optimizer]
name = "adamw"
lr = 3e-3
beta2 = 0.95
weight_decay = 0.1
[schedule]
kind = "cosine"
warmup = "5%"
final = 0.1
[gradient]
clip_norm = 1.0
[servers]
count = 1
[workers]
count = {workers}
batch_size = {batch}
threads = 1
[data]
portion_batches = {portion}
[evaluation]
{evaluation}
[checkpoints]
every_s = 0.0
"""

SMALL = '''"""The example chargpt with fewer, narrower layers and less text."""

import task as chargpt

chargpt.WIDTH, chargpt.HEADS, chargpt.LAYERS, chargpt.CONTEXT = 32, 4, 2, 32
chargpt.SAMPLES, chargpt.EVALUATED = 38_400, 256


class Small(chargpt.CharGpt):
    finish = None


task = Small()
'''


def digits(
    *, stop: str, workers: int = 4, batch: int = 16, portion: int = 4, task: str = "mlp.py:one",
    evaluation: str = "every_epochs = 1.0",
) -> str:  # fmt: skip
    """A job of the digits, for `Lab.place` with the example "digits" and the file mlp.py."""
    return DIGITS.format(
        task=task, stop=stop, workers=workers, batch=batch, portion=portion, evaluation=evaluation
    )


def small_gpt(*, stop: str, workers: int, batch: int, portion: int, evaluation: str) -> str:
    """For `Lab.place` with the example "chargpt" and the file small.py."""
    return GPT.format(
        stop=stop, workers=workers, batch=batch, portion=portion, evaluation=evaluation
    )
