"""The clinic: it has the scans and their labels, the first layers and, behind those of the lab, the
last one. Nothing else of this folder leaves it than what the first layers make of a batch.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

HELD_OUT = 360


class Clinic:
    def __init__(self):
        # 1797 scans of 8 x 8 pixels, each 0 to 16; the last 360 are held out.
        with np.load(Path(__file__).parent / "digits.npz") as file:
            images = torch.tensor(file["pixels"]).float() / 8
            labels = torch.tensor(file["labels"]).long()
        images -= images[:-HELD_OUT].mean(0)
        self.train = images[:-HELD_OUT], labels[:-HELD_OUT]
        self.test = images[-HELD_OUT:], labels[-HELD_OUT:]

    def client_model(self):
        """What sees the scans. Its output, the cut, is sent to the lab."""
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU())

    def top_model(self):
        """What follows the lab's layers: the labels stay here, too."""
        return nn.Linear(64, 10)

    def dataset(self):
        return TensorDataset(*self.train)

    def loss(self, output, labels):
        return functional.cross_entropy(output, labels)

    def evaluate(self, model):
        images, labels = self.test
        guesses = model(images).argmax(1)
        return {"accuracy": (guesses == labels).float().mean()}


task = Clinic()
