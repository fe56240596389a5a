"""Delayed updates: every one arrives everywhere, within its delay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from daemons.simulator.delays import Delayed, DelaySetting, Digits

DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "digits.npz"


@pytest.fixture(scope="module")
def data() -> Digits:
    return Digits.of(DIGITS)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_all_updates_arrive_at_all_workers(data: Digits, optimizer: str) -> None:
    training = Delayed(data, DelaySetting(optimizer, 1, 3, 4, (1, 2)), 0.01)
    begun = training.copies.clone()
    for _ in range(7):
        training.step()
    for _ in range(4):
        training.exchange(torch.zeros_like(begun))
    copies = training.copies
    for seed in range(2):
        mine = copies[3 * seed : 3 * seed + 3]
        torch.testing.assert_close(mine, mine[:1].expand_as(mine), rtol=0, atol=1e-5)
        assert not torch.allclose(mine[0], begun[3 * seed])
    assert not torch.allclose(copies[0], copies[3]), "seeds differ"


def test_without_delay_all_copies_are_equal_before_each_round(data: Digits) -> None:
    training = Delayed(data, DelaySetting("adagrad", 0, 4, 0, (5,)), 0.01)
    for _ in range(3):
        training.step()
        copies = training.copies.clone()
        training.exchange(torch.zeros_like(copies))
        assert torch.equal(training.copies, copies), "nothing is on its way"
        torch.testing.assert_close(copies, copies[:1].expand_as(copies), rtol=0, atol=1e-6)


@pytest.mark.parametrize("hidden", [0, 2])
def test_the_gradient_is_that_of_autograd(data: Digits, hidden: int) -> None:
    training = Delayed(data, DelaySetting("sgd", hidden, 2, 0, (5, 6)), 0.01)
    copies = training.copies.clone().requires_grad_()
    images, labels = data.images[:512], data.labels[:512]
    for number, gradient in enumerate(training.gradient()):
        scores = images
        views = training.views(copies[2 * number : 2 * number + 1])
        for layer in range(0, len(views), 2):
            scores = scores @ views[layer][0] + views[layer + 1][0]
            scores = scores.relu() if layer < len(views) - 2 else scores
        loss = torch.nn.functional.cross_entropy(scores, labels)
        (expected,) = torch.autograd.grad(loss, copies)
        torch.testing.assert_close(gradient, expected[2 * number], rtol=1e-4, atol=1e-7)
