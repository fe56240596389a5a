"""The digits with a training loop of its own, so that workers can join from anywhere.

`dlctl.attach` makes it a worker of a run; without a run, as with `python loop.py`, it trains alone.
"""

import torch
from torch.nn import functional
from train import Digits

import dlctl

BATCH_SIZE = 16


def main() -> None:
    digits = Digits()
    torch.manual_seed(0)
    model = digits.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with dlctl.attach(model, optimizer, evaluate=digits.evaluate) as run:
        for images, labels in run.loader(digits.dataset(), BATCH_SIZE):
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)


if __name__ == "__main__":
    main()
