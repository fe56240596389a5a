"""What it costs to go back to a checkpoint, in values and in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlctl.ops.remains import Findings, RollbackLoss, ShardRemains


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (RollbackLoss(0), "nothing is lost"),
        (RollbackLoss(0, {"server-0": 0}), "nothing is lost"),
        (RollbackLoss(1), "1 step done again"),
        (RollbackLoss(60, {"server-0": 21, "server-1": 0}), "60 steps done again, 21 updates lost"),
        (RollbackLoss(60, {"server-0": 1}, False), "60 steps done again, at least 1 update lost"),
        (RollbackLoss(0, {"server-0": 1, "server-1": None}), "an unknown number of updates lost"),
    ],
)
def test_a_loss_in_a_line(loss: RollbackLoss, text: str) -> None:
    assert loss.text() == text
    assert bool(loss) == (text != "nothing is lost")


def findings(*versions: int | None, step: int = 90) -> Findings:
    shards = [
        ShardRemains(f"server-{index}", False, "", version, True, "")
        for index, version in enumerate(versions)
    ]
    return Findings([], shards, [], True, step, {})


@pytest.mark.parametrize(
    ("found", "saved", "loss"),
    [
        (findings(41), (30, 20), RollbackLoss(60, {"server-0": 21})),
        (findings(41, step=20), (30, 50), RollbackLoss(0, {"server-0": 0})),
        (findings(41, None), (30, 20, 20), RollbackLoss(60, {"server-0": 21, "server-1": None})),
        (findings(41, 7), (30, 20), RollbackLoss(60, {"server-0": 21, "server-1": None})),
    ],
)
def test_a_loss_is_what_came_after_the_checkpoint(
    found: Findings, saved: tuple[int, ...], loss: RollbackLoss
) -> None:
    step, *versions = saved
    shards = [{"name": f"server-{i}", "state": {"version": v}} for i, v in enumerate(versions)]
    assert found.loss((Path("ckpt"), {"step": step, "shards": shards})) == loss


def test_without_a_checkpoint_all_of_it_is_lost() -> None:
    assert findings(41).loss(None) == RollbackLoss(90, {"server-0": 41})
