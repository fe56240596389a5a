"""`dlctl start` of a job whose coordinator runs elsewhere: as a job of the owner of the hosts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dlctl.launch import launcher
from dlctl.launch.launcher import ControlPlace
from dlctl.ops.cases import Start
from dlctl.runs import lock, reach
from dlctl.util import notes

if TYPE_CHECKING:
    from dlctl.job.config import JobFile

RUNNING = "RUNNING"


def of(start: Start) -> ControlPlace | None:
    """Where the coordinator of this job is to run; None: here."""
    return of_file(start.job, start.file)


def of_file(job: JobFile, file: Path) -> ControlPlace | None:
    place = launcher.of(job).control(file)
    return None if place is None or place.is_here else place


def begin(place: ControlPlace, start: Start, words: list[str]) -> str:
    """Ask for the place, unless there is one; returns its number. If there is one where the run has
    started, this process becomes the same command there. Raises DlctlError.
    """
    with lock.starting(start.file):
        number, state = place.find()
        if state.startswith(RUNNING) and place.started(number) is not None:
            reach.run(place.reach(number), sys.argv[1:])
        if number:
            notes.note(f"the coordinator of this job is job {number} already: {state.lower()}")
            return number
        # What it would find there may be known here, before it has waited in a queue.
        launcher.of(start.job).preflight()
        number = place.submit(words)
    notes.note(f"the coordinator is job {number}")
    return number


def finish(
    place: ControlPlace, number: str, tell: Callable[[str], None], limit_s: float | None
) -> tuple[int, str]:
    """Wait for `dlctl start` there: its exit code and output. Raises DlctlError."""
    return place.wait(number, tell, limit_s)


def follow(place: ControlPlace, number: str, file: Path) -> None:
    """Become `dlctl logs --follow` there."""
    reach.run(place.reach(number), ["logs", "--follow", "-j", str(file)])
