"""Fashion-MNIST: 70000 pictures of clothes in ten kinds, and a network of 235146 parameters.

In this folder:

    dlctl run job.toml

Only one gradient in a hundred travels (`density = 0.01` in job.toml). The others wait in the worker
and add up until they are large enough, so that nothing is lost.
"""

import fashion_data
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset


class FashionMnist:
    test_set = None

    def model(self):
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 256),
            nn.ReLU(),
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def dataset(self):
        return as_tensors("train")

    def loss(self, model, batch):
        images, labels = batch
        return functional.cross_entropy(model(scaled(images)), labels)

    def evaluate(self, model):
        # Only one worker evaluates, so the others never load the test set.
        if self.test_set is None:
            self.test_set = as_tensors("t10k")
        images, labels = self.test_set.tensors
        device = next(model.parameters()).device
        scores = model(scaled(images.to(device)))
        labels = labels.to(device)
        return {
            "accuracy": (scores.argmax(1) == labels).float().mean(),
            "test_loss": functional.cross_entropy(scores, labels),
        }


def as_tensors(part):
    """Bytes stay bytes: a quarter of the memory of floats in every worker."""
    images, labels = fashion_data.load(part)
    return TensorDataset(torch.from_numpy(images), torch.from_numpy(labels).long())


def scaled(images):
    """Mean 0 and deviation 1, over the whole training set."""
    return (images.float() / 255 - 0.286) / 0.353


task = FashionMnist()
