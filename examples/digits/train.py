"""Handwritten digits, learned by four workers and two parameter servers in a few seconds.

Run it from anywhere:

    dlctl run examples/digits/job.toml

A task is an object with a model, a dataset and a loss; `evaluate` is optional. That is all dlctl
wants to know. How the replicas are trained together stands in job.toml.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset


class Digits:
    def __init__(self):
        # 1797 scans of 8 x 8 pixels, each 0 to 16. The seed gives every worker the same split.
        pixels, digits = load_digits(return_X_y=True)
        images = torch.tensor(pixels / 8, dtype=torch.float32)
        labels = torch.tensor(digits)
        train, test, self.train_labels, self.test_labels = train_test_split(
            images, labels, test_size=360, stratify=digits, random_state=0
        )
        # Without the mean image the pixels are as often negative as positive: it learns faster.
        mean = train.mean(0)
        self.train_images, self.test_images = train - mean, test - mean

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
