"""`dlctl sweep` on real daemons: one short sweep, and one that is killed with all of its runs."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from workplace import Workplace

SETS = ("--set", "optimizer.lr=0.01,0.1,0.3", "--metric", "accuracy max", "--sampler", "grid")


def trials(place: Workplace) -> list[dict[str, Any]]:
    (directory,) = place.path.glob("runs/*-sweep-*")
    found = json.loads(place.dlctl("sweep", "ls", str(directory), "--json").out)
    return sorted(found["trials"], key=lambda trial: trial["number"])


@pytest.mark.long
def test_a_sweep_tries_each_value_and_writes_the_best(place: Workplace) -> None:
    place.job(stop="{ epochs = 3 }")
    before = (place.path / "job.toml").read_text()
    ended = place.dlctl("sweep", "job.toml", *SETS, "--slots", "2", timeout_s=200)
    assert ended.code == 0, ended.err
    found = trials(place)
    assert [trial["point"]["optimizer.lr"] for trial in found] == [0.01, 0.1, 0.3]
    assert {trial["state"] for trial in found} == {"done"}
    best = max(found, key=lambda trial: trial["score"])["point"]["optimizer.lr"]
    assert place.dlctl("sweep", "best", "--write").code == 0
    after = (place.path / "job.toml").read_text()
    assert f"lr = {best}" in after
    assert after == before.replace("lr = 0.1", f"lr = {best}")


@pytest.mark.long
def test_a_sweep_that_was_killed_with_everything_goes_on(place: Workplace) -> None:
    place.task(pause_s=0.02)
    place.job(stop="{ epochs = 6 }", checkpoint_every_s=0.5)
    command = place.begin("sweep", "job.toml", *SETS)

    def has_checkpoint() -> list[Path]:
        return list(place.path.glob("runs/*-sweep-*/*/ckpt/*/manifest.json"))

    place.until("a trial has a checkpoint", has_checkpoint, 60.0)
    command.process.send_signal(signal.SIGKILL)
    for process in psutil.process_iter(["cmdline"]):
        if any(f"{place.path}/runs" in word for word in process.info["cmdline"] or []):
            process.kill()
    command.process.wait()
    ended = place.dlctl("sweep", "--resume", timeout_s=200)
    assert ended.code == 0, ended.err
    found = trials(place)
    assert [trial["state"] for trial in found] == ["done"] * 3
    assert len({trial["run"] for trial in found}) == 3
    assert len(list(place.path.glob("runs/*-sweep-*/*/run.db"))) == 3  # None was begun anew.


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--set", "optimizer.rate=0.1,0.2"], "rate"),
        (["--set", "optimizer.lr=fast,slow"], "lr"),
        (["--set", "optimizer.lr=0.1..0.3", "--sampler", "grid"], "grid"),
        (["--set", "optimizer.lr=0.1,0.3"], "metric"),
    ],
)
def test_what_cannot_be_swept_is_refused(
    place: Workplace, command_at: Callable[..., Any], arguments: list[str], word: str
) -> None:
    place.job()
    ended = command_at(place, "sweep", "job.toml", *arguments)
    assert ended.code == 2, ended.err
    assert word in ended.err
    assert not list(place.path.glob("runs/*"))
