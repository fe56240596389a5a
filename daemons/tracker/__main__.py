"""Runs one tracker: `python -m daemons.tracker RUN_DIRECTORY wandb|mlflow`."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from daemons.process import read_job
from daemons.tracker.client import TrackerClient
from daemons.tracker.notes import TrackerNotes
from dlctl.errors import DlctlError
from dlctl.job.config import JobFile
from dlctl.util.redact import redacted

LEAVE_S = 10.0
"""Time to deliver what has come when the coordinator is gone."""
LOOK_S = 0.5
PIECE_BYTES = 1 << 16
ERROR_CHARS_MAX = 500


def main(directory: Path, tracker: str) -> int:
    asked, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # What the package prints is no answer, and it is to ask for nothing.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    threading.Thread(target=_end_without, args=(os.getppid(),), daemon=True).start()
    try:
        notes = TrackerNotes(directory, tracker)
        with notes.held():
            client = _client(tracker, directory, read_job(directory), notes)
            _answer(answers, begun=True)
            _serve(client, notes, asked, answers)
    except Exception as error:  # Libraries raise anything.
        _answer(answers, error=_words(error))
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


def _serve(client: TrackerClient, notes: TrackerNotes, asked: int, answers: int) -> None:
    for lines in _pieces(asked):
        rows = [json.loads(line) for line in lines]
        new = [row for row in rows if "step" in row and notes.is_new(row)]
        if new := _without_repeats(new):
            client.log(new)
            for row in new:
                notes.add(row)
            notes.write()
        outcome = next((row["outcome"] for row in rows if "outcome" in row), "")
        if outcome:
            client.end(outcome)
        if rows:
            _answer(answers, number=rows[-1]["number"])
        if outcome:
            return
    client.leave()


def _without_repeats(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of rows of a series with one step in a row only the last, which has the newest values."""
    last: dict[str, dict[str, Any]] = {}
    kept = []
    for row in reversed(rows):
        after = last.get(row["series"])
        if after is None or after["step"] != row["step"]:
            kept.append(row)
        last[row["series"]] = row
    return kept[::-1]


def _pieces(asked: int) -> Iterator[list[bytes]]:
    """Whole lines of the input, as many as are there."""
    rest = b""
    while piece := os.read(asked, PIECE_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        yield lines


def _answer(answers: int, **facts: Any) -> None:
    """Raises OSError if the coordinator is gone."""
    os.write(answers, json.dumps(facts).encode() + b"\n")


def _words(error: Exception) -> str:
    """What has failed, in a line and without credentials."""
    text = error.message if isinstance(error, DlctlError) else str(error)
    line = " ".join(redacted(text).split()) or type(error).__name__
    return line[:ERROR_CHARS_MAX]


def _end_without(coordinator: int) -> None:
    """End this process a while after its coordinator, whatever the package is waiting for."""
    never = threading.Event()
    while os.getppid() == coordinator:
        never.wait(LOOK_S)
    never.wait(LEAVE_S)
    os._exit(1)


code = main(Path(sys.argv[1]), sys.argv[2])
# Functions that the package has registered would end the tracker's run, or wait for a server.
os._exit(code)
