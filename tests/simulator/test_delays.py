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
    copies = training.copies + training.pending.sum(0)
    for seed in range(2):
        mine = copies[3 * seed : 3 * seed + 3]
        torch.testing.assert_close(mine, mine[:1].expand_as(mine), rtol=0, atol=1e-5)
        assert not torch.allclose(mine[0], begun[3 * seed])
    assert not torch.allclose(copies[0], copies[3]), "seeds differ"


def test_without_delay_all_copies_are_equal_before_each_round(data: Digits) -> None:
    training = Delayed(data, DelaySetting("adagrad", 0, 4, 0, (5,)), 0.01)
    for _ in range(3):
        training.step()
        assert not training.pending.any()
        copies = training.copies
        torch.testing.assert_close(copies, copies[:1].expand_as(copies), rtol=0, atol=1e-6)
