"""What `dlctl sweep` shows of its trials, and what it writes into a job file."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dlctl.ops import sweep
from dlctl.runs.sweep_database import SweepDb

JOB = """[job]
name = "a"
task = "train.py:task"
stop = { steps = 9 }
[optimizer]
name = "sgd"
lr = 0.1  # alpha
"""
Command = Callable[..., Any]


@pytest.fixture
def directory(own_place: Path) -> Path:
    """Of a sweep of two points with two seeds each: the first one has the best trial, the second
    one the better mean.
    """
    (own_place / "train.py").write_text("task = None\n")
    file = own_place / "job.toml"
    file.write_text(JOB)
    plan = sweep.SweepPlan(str(file), ("optimizer.lr=0.2,0.3",), 0, "a max", "grid", "none", 2, 0)
    made = sweep.begin(plan)
    scores = [-0.9, -0.1, -0.8, -0.7]
    with closing(SweepDb(made)) as db:
        db.add(0, [({"optimizer.lr": lr}, seed) for lr in (0.2, 0.3) for seed in (0, 1)])
        for number, score in enumerate(scores, 1):
            db.set(number, state="done", score=score, run=f"a-{number}")
    return made


def put(directory: Path, number: int, **values: Any) -> None:
    with closing(SweepDb(directory)) as db:
        db.set(number, **values)


def test_the_best_point_by_its_mean_is_written(directory: Path, dlctl_command: Command) -> None:
    best = json.loads(dlctl_command("sweep", "best", "--write", "--json").out.splitlines()[0])
    assert best["values"] == {"optimizer.lr": 0.3}
    assert best["score"] == pytest.approx(0.75)
    assert best["runs"] == ["a-3", "a-4"]
    assert Path("job.toml").read_text() == JOB.replace("lr = 0.1", "lr = 0.3")


def test_the_list_has_the_mean_of_each_point(directory: Path, dlctl_command: Command) -> None:
    trials = json.loads(dlctl_command("sweep", "ls", str(directory), "--json").out)["trials"]
    assert [trial["number"] for trial in trials] == [3, 4, 1, 2]
    assert [trial["mean"] for trial in trials] == pytest.approx([0.75, 0.75, 0.5, 0.5])
    put(directory, 1, state="pruned")  # As an earlier dlctl did, for one seed alone.
    trials = json.loads(dlctl_command("sweep", "ls", str(directory), "--json").out)["trials"]
    assert [trial["mean"] for trial in trials[2:]] == [None, None]


def test_a_job_file_is_not_written_while_trials_are_open(
    directory: Path, dlctl_command: Command
) -> None:
    put(directory, 2, state="preempted", score=None)
    refused = dlctl_command("sweep", "best", "--write")
    assert refused.code == 2
    assert f"dlctl sweep resume {directory}" in refused.err
    assert Path("job.toml").read_text() == JOB
    assert dlctl_command("sweep", "best", "-o", "other.toml").code == 0
    assert "lr = 0.3" in Path("other.toml").read_text()


def test_a_job_file_that_was_moved_is_named(directory: Path, dlctl_command: Command) -> None:
    Path("job.toml").rename("moved.toml")
    for arguments in (["best", "--write"], ["resume"]):
        put(directory, 2, state="done" if "best" in arguments else "queued")
        refused = dlctl_command("sweep", *arguments)
        assert refused.code == 2, arguments
        assert "job.toml" in refused.err
