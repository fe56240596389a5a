"""What a sweep has on record."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from dlctl.errors import NotFound
from dlctl.runs.sweep_database import SweepDb, read


def test_a_rung_that_was_judged_stays_judged(tmp_path: Path) -> None:
    with closing(SweepDb(tmp_path, create=True)) as db:
        db.put_plan({"trials": 3})
        db.add(0, [({"lr": lr}, 0) for lr in (0.1, 0.2, 0.3)])
        db.set(2, state="running", score=0.5)
        db.prune([1, 3], [2], rung=0)
    plan, trials = read(tmp_path)
    assert plan == {"trials": 3}
    assert [trial["state"] for trial in trials] == ["pruned", "running", "pruned"]
    assert [trial["rung"] for trial in trials] == [0, 1, 0]
    assert trials[1]["point"] == {"lr": 0.2}
    assert trials[1]["score"] == 0.5


def test_another_directory_is_no_sweep(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        SweepDb(tmp_path)
