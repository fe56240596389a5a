"""What a killed command leaves behind is no run, and nothing of the user's is ever touched."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys

import pytest

from dlctl.errors import DlctlError
from dlctl.ops import launch, stop
from dlctl.ops.cases import Case
from dlctl.ops.decide import Facts
from dlctl.runs import paths
from dlctl.runs.snapshot import load

KILLED = """
import os, sys
from dlctl.ops import recover
from dlctl.cli import app as main
recover.first_row = lambda *_, **__: os.kill(os.getpid(), 9)
main.run(["start", "job.toml"])
"""


def test_a_directory_that_a_killed_command_began_is_no_run(job, own_place, play, dlctl_command):
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (begun,) = (own_place / "runs").iterdir()
    assert not paths.is_run(begun)
    play("start", "ready", "forever")
    assert dlctl_command("start", "job.toml").code == 0
    (directory,) = (path for path in (own_place / "runs").iterdir() if path != begun)
    assert paths.is_run(directory)


def test_directories_of_the_users_with_names_like_runs_are_never_touched(
    job, own_place, play, dlctl_command
):
    own = own_place / "runs" / "quick-2024"
    (own / "photos").mkdir(parents=True)
    (own / "photos" / "cat.jpg").write_text("a cat")
    empty = own_place / "runs" / "quick-2025"
    empty.mkdir()
    play("start", "ready", "finish")
    assert dlctl_command("run", "job.toml").code == 0
    assert (own / "photos" / "cat.jpg").read_text() == "a cat"
    assert empty.is_dir()


def test_a_coordinator_that_never_says_who_it_is_is_left_alone(run_directory, monkeypatch) -> None:
    """It was started by a command that was killed; it may be about to train."""
    run = run_directory().run(state="failed", pid=None, pid_start=None)
    monkeypatch.setattr(stop, "clean_up", None)
    case = Case(Facts(), load(run.path))
    with (run.path / paths.LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DlctlError, match="coordinator"):
            launch._leave(case, load(run.path))
