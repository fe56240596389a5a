"""Runs that an older dlctl has left are read, recovered and resumed by this one.

The archive is unpacked elsewhere than where the runs were made. `relocated` corrects the absolute
paths in them, as if they had always been there; without that, a directory is a moved or copied one.
"""

from __future__ import annotations

import json
import shlex
import sqlite3
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from workplace import Workplace

from dlctl.runs import checkpoints, database
from dlctl.runs.database import SCHEMA_VERSION, RunDb

ARCHIVE = Path(__file__).parents[1] / "data" / "runs-0947a719.tar.xz"
MADE_IN = "/tmp/old"
FINISHED, KILLED = "clouds-3570", "killed-3108"
BATCHES = 32
"""In an epoch."""
EPOCHS = 12
"""Of the run that was killed in its ninth one, as its servers know. It was to have forty."""


@pytest.fixture
def old(place: Workplace) -> Workplace:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(place.path, filter="data")
    task = place.path / "train.py"
    task.write_text(task.read_text().replace("wait(0.02)", "wait(0.0)"))
    return place


def move(old: Workplace, root: Path, inodes: dict[str, int]) -> None:
    """Let the runs say that their project was in this folder."""
    for run in (FINISHED, KILLED):
        job = old.path / "runs" / run / "job.json"
        job.write_text(job.read_text().replace(MADE_IN, str(root)))
        with closing(RunDb(job.parent)) as db:
            file = str(db.run()["job_file"]).replace(MADE_IN, str(root))
            at = {"path": str(root / "runs" / run), "inode": inodes.get(run, 0)}
            db.put_run(job_file=file, place=at)
            db.commit()


@pytest.fixture
def relocated(old: Workplace) -> Workplace:
    """The project, as if it had always been here."""
    move(
        old, old.path, {run: (old.path / "runs" / run).stat().st_ino for run in (FINISHED, KILLED)}
    )
    return old


@pytest.fixture
def copied(old: Workplace) -> Workplace:
    """The project as it was copied from another machine."""
    move(old, old.path / "elsewhere", {})
    return old


@pytest.mark.long
def test_every_command_that_reads_reads_them(
    relocated: Workplace, command_at: Callable[..., Any]
) -> None:
    def output_of(*command: str) -> str:
        ended = command_at(relocated, *command)
        assert ended.code == 0, (command, ended.err)
        return ended.out

    status = json.loads(output_of("status", "-j", FINISHED, "--json"))
    assert (status["state"], status["step"], status["data_epoch"]) == ("finished", 64, 2.0)
    assert status["evaluation"]["accuracy"] > 0.9
    status = json.loads(output_of("status", "-j", KILLED, "--json"))
    assert (status["state"], status["step"]) == ("failed", 136)
    assert {row["state"] for row in status["daemons"]} >= {"gone"}
    assert "took" in output_of("status", "-j", FINISHED)
    assert "dlctl recover" in output_of("status", "-j", KILLED)

    logs = output_of("logs", "-j", KILLED)
    assert all(f"{name} starts" in logs for name in ("server-1", "worker-0", "worker-1"))
    assert "server-1 starts, incarnation 1" in output_of("events", "-j", KILLED)
    output_of("why", "-j", KILLED)
    output_of("report", "-j", FINISHED, "-o", "page.html")
    page = (relocated.path / "page.html").read_text()
    assert FINISHED in page
    assert "2 epochs are done" in page
    for run in (FINISHED, KILLED):
        found = json.loads(output_of("verify", "-j", run, "--json"))
        assert found["lost"] == 0, found
        saved = relocated.path / f"{run}.safetensors"
        output_of("checkpoint", "export", "-j", run, "-o", str(saved))
        weights = load_file(saved)
        assert {name: value.shape for name, value in weights.items()} == {
            "0.weight": (8, 2), "0.bias": (8,), "2.weight": (2, 8), "2.bias": (2,),
        }  # fmt: skip
        assert all(np.isfinite(value).all() for value in weights.values())


def test_the_one_whose_processes_were_killed_goes_on_to_its_end(relocated: Workplace) -> None:
    file = relocated.path / "runs" / KILLED / "job.json"
    job = json.loads(file.read_text())
    job["job"]["stop"]["epochs"] = EPOCHS
    file.write_text(json.dumps(job))
    asked = json.loads(relocated.dlctl("recover", "-j", KILLED, "--dry-run", "--json").out)
    assert (asked["way"], asked["lost_steps"], asked["obstacles"]) == ("go on", 0, [])
    back = relocated.dlctl("recover", "-j", KILLED)
    assert back.code == 0, back.err
    assert relocated.dlctl("wait", "-j", KILLED).code == 0
    run = database.read(relocated.path / "runs" / KILLED)
    assert (run["state"], run["step"]) == ("finished", EPOCHS * BATCHES)
    found = json.loads(relocated.dlctl("verify", "-j", KILLED, "--json").out)
    assert found["lost"] == 0, found
    relocated.nothing_left()


@pytest.mark.long
def test_the_one_that_has_finished_trains_on_from_its_checkpoint(relocated: Workplace) -> None:
    job = relocated.path / "job.toml"
    job.write_text(job.read_text().replace("epochs = 2", "epochs = 3"))
    ended = relocated.dlctl("run", "job.toml")
    assert ended.code == 0, ended.err
    assert " step 64" in ended.err
    directory = relocated.path / "runs" / FINISHED
    assert database.read(directory)["step"] == 3 * BATCHES
    saved = [checkpoints.read_manifest(path)["step"] for path in checkpoints.complete(directory)]
    assert saved == [2 * BATCHES, 3 * BATCHES]
    relocated.nothing_left()


@pytest.mark.long
def test_who_has_copied_them_is_told_how_a_new_run_goes_on(copied: Workplace) -> None:
    """The path of the project in the runs is another machine's."""
    refused = copied.dlctl("start", "job.toml")
    assert refused.code == 1
    (line,) = [line for line in refused.err.splitlines() if "dlctl start --from " in line]
    command = shlex.split(line[line.index("dlctl start --from ") :])
    job = copied.path / "job.toml"
    job.write_text(job.read_text().replace("epochs = 2", "epochs = 3"))
    began = copied.dlctl(*command[1:])
    assert began.code == 0, began.err
    copied.until_state("finished")
    assert copied.run()["step"] == 3 * BATCHES
    copied.nothing_left()


@pytest.mark.parametrize("command", ["status", "recover", "verify", "report", "stop", "why"])
def test_a_run_of_a_newer_version_is_one_clear_error(
    relocated: Workplace, command_at: Callable[..., Any], command: str
) -> None:
    directory = relocated.path / "runs" / KILLED
    with closing(sqlite3.connect(directory / database.FILE)) as db:
        db.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    ended = command_at(relocated, *command.split(), "-j", KILLED)
    assert ended.code == 1
    assert ended.err.count("error: ") == 1
    assert f" version {SCHEMA_VERSION + 1}" in ended.err
    assert f"next: dlctl start --from runs/{KILLED}/ckpt/000000000054-1 long.toml" in ended.err
    assert "Traceback" not in ended.err
