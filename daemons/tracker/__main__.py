"""Runs one tracker: `python -m daemons.tracker RUN_DIRECTORY wandb|mlflow COORDINATOR_PID`."""

from __future__ import annotations

import json
import math
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from daemons.process import read_job
from daemons.tracker import orphan
from daemons.tracker.answers import TrackerAnswers
from daemons.tracker.client import TrackerClient
from daemons.tracker.notes import TrackerNotes
from dlctl.errors import DlctlError
from dlctl.job.config import JobFile
from dlctl.util.redact import redacted

LOOK_S = 0.5
PIECE_BYTES = 1 << 16
ERROR_CHARS_MAX = 500


def main(directory: Path, tracker: str, coordinator: int) -> int:
    asked, told = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # What the package prints is no answer, and it is to ask for nothing.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    has_begun = orphan.watch(coordinator)
    notes = TrackerNotes(directory, tracker)
    answers = TrackerAnswers(told, notes)
    try:
        with notes.held():
            client = _client(tracker, directory, read_job(directory), notes)
            has_begun.set()
            answers.say(begun=True)
            _serve(client, notes, asked, answers)
    except Exception as error:  # Libraries raise anything.
        answers.say(error=_words(error))
        return 1
    return 0


def _client(tracker: str, directory: Path, job: JobFile, notes: TrackerNotes) -> TrackerClient:
    """Import the package, and go on with the tracker's run, or begin it."""
    client: TrackerClient
    if tracker == "wandb":
        from daemons.tracker.of_wandb import WandbRun

        client = WandbRun(directory, job, notes)
    else:
        from daemons.tracker.of_mlflow import MlflowRun

        client = MlflowRun(directory, job, notes)
    return client


def _serve(client: TrackerClient, notes: TrackerNotes, asked: int, answers: TrackerAnswers) -> None:
    outcome = None
    for lines in _pieces(asked):
        rows = [json.loads(line) for line in lines]
        if new := _new(rows, notes):
            client.log(new)
        if rows:
            answers.hold(rows[-1]["number"], time.monotonic() + client.holds_s)
        answers.release(time.monotonic())
        outcome = next((row["outcome"] for row in rows if "outcome" in row), None)
        if outcome is not None:
            break
    if outcome:
        client.end(outcome)
    else:
        client.leave()
    answers.release(math.inf)


def _new(rows: list[dict[str, Any]], notes: TrackerNotes) -> list[dict[str, Any]]:
    """The rows that the tracker does not have; from now on it has them."""
    found = []
    for row in rows:
        if "step" in row and notes.is_new(row):
            notes.add(row)
            found.append(row)
    return found


def _pieces(asked: int) -> Iterator[list[bytes]]:
    """Whole lines of the input, as many as are there; none now and then."""
    rest = b""
    while True:
        if not select.select([asked], [], [], LOOK_S)[0]:
            yield []
            continue
        if not (piece := os.read(asked, PIECE_BYTES)):
            return
        *lines, rest = (rest + piece).split(b"\n")
        yield lines


def _words(error: Exception) -> str:
    """What has failed, in a line and without credentials."""
    text = error.message if isinstance(error, DlctlError) else str(error)
    line = " ".join(redacted(text).split()) or type(error).__name__
    return line[:ERROR_CHARS_MAX]


code = main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
# Functions that the package has registered would end the tracker's run, or wait for a server.
os._exit(code)
