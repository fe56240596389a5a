"""`dlctl start` of a job whose coordinator runs elsewhere: as a job of the owner of the hosts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from dlctl.launch import launcher
from dlctl.launch.launcher import ControlPlace
from dlctl.ops import cases
from dlctl.runs import lock, reach
from dlctl.util import notes

RUNNING = "RUNNING"


def of(file: Path) -> ControlPlace | None:
    """Where the coordinator of this job file is to run; None: here. Raises DlctlError as
    `cases.read` does.
    """
    place = launcher.of(cases.read(file).job).control(file)
    return None if place is None or place.is_here else place


def begin(place: ControlPlace, file: Path, words: list[str]) -> str:
    """Ask for the place, unless there is one; returns its number. If there is one where the run has
    started, this process becomes the same command there. Raises DlctlError.
    """
    with lock.starting(file):
        number, state = place.find()
        if state.startswith(RUNNING) and place.started(number) is not None:
            reach.run(place.reach(number), sys.argv[1:])
        if number:
            notes.note(f"the coordinator of this job is job {number} already: {state.lower()}")
            return number
        # What it would find there may be known here, before it has waited in a queue.
        launcher.of(cases.read(file).job).preflight()
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
