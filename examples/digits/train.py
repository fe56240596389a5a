"""Handwritten digits, learned by four workers and two parameter servers in a few seconds.

A task is an object with a model, a dataset and a loss; `evaluate` is optional. That is all dlctl
wants to know. How the replicas are trained together stands in job.toml.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

HELD_OUT = 360


class Digits:
    def __init__(self):
        # 1797 scans of 8 x 8 pixels, each 0 to 16; the last 360 are held out.
        with np.load(Path(__file__).parent / "digits.npz") as file:
            images = torch.tensor(file["pixels"]).float() / 8
            labels = torch.tensor(file["labels"]).long()
        # Without the mean image the pixels are as often negative as positive: it learns faster.
        images -= images[:-HELD_OUT].mean(0)
        self.train_images, self.test_images = images[:-HELD_OUT], images[-HELD_OUT:]
        self.train_labels, self.test_labels = labels[:-HELD_OUT], labels[-HELD_OUT:]

    def model(self):
        return nn.Sequential(
            nn.Linear(64, 128),
            nn.ReLU(),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def dataset(self):
        return TensorDataset(self.train_images, self.train_labels)

    def loss(self, model, batch):
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def evaluate(self, model):
        device = next(model.parameters()).device
        guesses = model(self.test_images.to(device)).argmax(1).cpu()
        return {"accuracy": (guesses == self.test_labels).float().mean()}


task = Digits()
