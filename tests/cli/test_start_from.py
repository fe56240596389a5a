"""`dlctl start --from`: a new run begins with a checkpoint of another one, wholly or not at all."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from dead_runs import save
from stand_in_jobs import the_run

from dlctl.runs import checkpoints, database, paths, terms
from dlctl.util.text import DISCARDED, NO_WORKER

KILLED_AFTER = """
import os, sys
from dlctl.runs import checkpoints, database
from dlctl.cli import app as main
call = {doom}
def last(*args, **keys):
    call(*args, **keys)
    os.kill(os.getpid(), 9)
{doom} = last
main.run(["start", "--from", sys.argv[1], "job.toml"])
"""


@pytest.fixture
def stopped(job, play, own_place, dlctl_command) -> Path:
    """The directory of a run that was stopped, with a checkpoint."""
    play("start", "ready", "forever")
    dlctl_command("start", "job.toml")
    dlctl_command("stop")
    return Path(the_run(own_place)["directory"])


def new_run(own_place: Path, old: Path) -> Path:
    (directory,) = (path for path in (own_place / "runs").iterdir() if path.name != old.name)
    return directory


@pytest.mark.per_commit(1)
@pytest.mark.parametrize(
    "doom", ["checkpoints.create", "checkpoints.write_manifest", "database.RunDb.commit"]
)
def test_a_start_that_is_killed_leaves_nothing_that_passes_for_a_run(
    stopped, own_place, dlctl_command, doom
):
    """Half of a copy, or a run without its terms: it would be the newest one of its job."""
    (saved,) = checkpoints.complete(stopped)
    command = [sys.executable, "-c", KILLED_AFTER.format(doom=doom), saved]
    killed = subprocess.run(command, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not paths.is_run(new_run(own_place, stopped))
    assert dlctl_command("ps", "-a", "-q").out == f"{stopped.name}\n"


def test_a_checkpoint_of_a_model_that_may_be_ruined_is_said_to_be_one(
    job, play, run_directory, dlctl_command
):
    play("start", "ready", "forever")
    failure = f"{NO_WORKER}: {DISCARDED} in 3 steps in a row"
    source = save(run_directory("old-0001"), step=30, number=4, failure=failure)
    code, _, err = dlctl_command("start", "--from", str(source), "job.toml")
    told = "checkpoint 4 was saved when the run failed: the model may be ruined"
    assert (code, told in err) == (0, True), err


def test_what_a_checkpoint_knows_of_terms_is_not_given_out_again(
    job, play, own_place, run_directory, dlctl_command
):
    """A worker may have saved no arrays; and what a row holds, nobody has checked."""
    play("start", "ready", "forever")
    old = run_directory("old-0001")
    nobody = {"name": "worker-0", "file": "", "sha256": "", "nbytes": 0, "state": {}}
    rows = ([0, 3, 17], [0, 2, 9], [1, 7, 4, 6], ["0", 9, 1], [2])
    source = save(old, step=30, number=4, deliveries=rows, workers=[nobody])
    code, _, err = dlctl_command("start", "--from", str(source), "job.toml")
    assert code == 0, err
    new = new_run(own_place, old.path)
    with closing(database.RunDb(new, readonly=True)) as db:
        assert terms.newest(new, db) == {"server-0": 0, "worker-0": 3, "worker-1": 7}


def test_a_run_that_cannot_be_gone_on_with_is_not_named_beside_its_checkpoint(
    stopped, own_place, tmp_path, dlctl_command
):
    """It is what the new one begins with: "it is not used" would be wrong."""
    (saved,) = checkpoints.complete(stopped)
    (stopped / database.FILE).write_bytes(b"torn" * 4096)
    code, _, err = dlctl_command("start", "--from", str(saved), "job.toml")
    assert (code, "not used" in err) == (0, False), err
