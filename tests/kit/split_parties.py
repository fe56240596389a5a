"""A run of split learning whose parties are in folders of their own, and what each has received."""

from __future__ import annotations

import pickle
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from workplace import Workplace

CLINIC = """
import threading
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

PAUSE_S = {pause_s}
torch.manual_seed(5)
X = torch.randn(256, 16)
Y = (X[:, :4].sum(1) > 0).long() + 2 * (X[:, 4:8].sum(1) > 0).long()


class Slow(nn.Module):
    def forward(self, z):
        threading.Event().wait(PAUSE_S)
        return z


class Clinic:
    def client_model(self):
        return nn.Sequential(nn.Linear(16, 12), {norm}nn.Tanh(), Slow())

    def top_model(self):
        return nn.Linear(8, 4)

    def dataset(self):
        return TensorDataset(X, Y)

    def loss(self, output, y):
        return functional.cross_entropy(output, y)

    def evaluate(self, model):
        return {{"accuracy": (model(X[:64]).argmax(1) == Y[:64]).float().mean()}}


task = Clinic()
"""
LAB = """
from torch import nn
from torch.nn import functional


class Lab:
    def server_model(self):
        return nn.Sequential(nn.Linear(12, 8), nn.ReLU(){last})

    def loss(self, output, y):
        return functional.cross_entropy(output, y)


task = Lab()
"""
RECORDING = '''
import os
import pickle
from pathlib import Path

from dlctl.wire import codec

FOLDER = ""
decode = codec.decode


def recorded(*arguments, **more):
    """Every message that this process receives, from now on."""
    message = decode(*arguments, **more)
    with open(Path(FOLDER or Path(__file__).parent) / f"received.{os.getpid()}", "ab") as file:
        pickle.dump((type(message).__name__, arrays_in(message)), file)
    return message


def arrays_in(thing):
    import numpy as np

    if isinstance(thing, np.ndarray):
        return [np.array(thing)]
    if isinstance(thing, tuple | list):
        return [array for each in thing for array in arrays_in(each)]
    names = getattr(thing, "__slots__", ()) if type(thing).__module__.startswith("dlctl.") else ()
    return [array for name in names for array in arrays_in(getattr(thing, name, None))]


codec.decode = recorded
'''
JOB = """
[job]
name = "split"
stop = {{ epochs = 2 }}
[algorithm]
name = "split"
{algorithm}
[optimizer]
name = "momentum"
lr = 0.05
[workers]
batch_size = 8
threads = 1
[data]
portion_batches = 2
shuffle = false
[evaluation]
every_epochs = 1
[checkpoints]
every_s = 0.0
[[parties]]
name = "clinic"
role = "client"
task = "clinic/train.py:task"
host = "local"
workers = {clients}
[[parties]]
name = "lab"
role = "head"
task = "lab/train.py:task"
host = "local"
"""
BATCHES = 64
"""Of both epochs."""


def write(
    place: Workplace, algorithm: str, *, clients: int = 2, pause_s: float = 0.0, norm: str = ""
) -> None:
    """norm: a layer of the clients' model, behind the first one."""
    is_u = 'shape = "u"' in algorithm
    for name, text in (
        ("clinic", CLINIC.format(pause_s=pause_s, norm=norm)),
        ("lab", LAB.format(last="" if is_u else ", nn.Linear(8, 4)")),
    ):
        (place.path / name).mkdir()
        (place.path / name / "train.py").write_text(text)
    (place.path / "job.toml").write_text(JOB.format(algorithm=algorithm, clients=clients))


def loaded(path: Path) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(path)))


def received(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(kind of message, an array in it) of all that the processes of a party have received."""
    for path in folder.glob("received.*"):
        with path.open("rb") as file:
            while True:
                try:
                    kind, arrays = pickle.load(file)
                except EOFError:
                    break
                for array in arrays:
                    yield kind, array


def has(values: np.ndarray, part: np.ndarray) -> bool:
    """Whether a run of elements of the flat `values` is `part`, to 1e-6."""
    values, part = values.reshape(-1).astype(np.float64), part.reshape(-1).astype(np.float64)
    if values.size < part.size:
        return False
    windows = np.lib.stride_tricks.sliding_window_view(values, part.size)
    return bool((np.abs(windows - part).max(1) < 1e-6).any())


def exported(place: Workplace) -> dict[str, np.ndarray]:
    ended = place.dlctl("checkpoint", "export", "-o", "model.pt")
    assert ended.code == 0, ended.err
    state = torch.load(place.path / "model.pt", weights_only=True)
    return {name: value.numpy() for name, value in state.items()}
