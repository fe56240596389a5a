"""How commands reach the machine of a coordinator that runs elsewhere, as in a job of a batch
system: they are run there, where all that they look at is.

`reach.json` in the run directory says how; the coordinator's launcher writes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dlctl.errors import DlctlError
from dlctl.runs import database, paths
from dlctl.util import notes, regular

FILE = "reach.json"
ASK_S = 20.0


class Reach(NamedTuple):
    what: str
    """Where the coordinator runs, for people: "the control job 17"."""
    variable: str
    """A process there has this variable of the environment ..."""
    value: str
    """... with this value."""
    state: tuple[str, ...]
    """A command that prints the state of that place, and perhaps a reason; nothing: it is gone."""
    command: tuple[str, ...]
    """What runs a command there: it follows."""

    @property
    def is_here(self) -> bool:
        return os.environ.get(self.variable) == self.value

    def write(self, directory: Path) -> None:
        """Raises OSError."""
        paths.write(directory / FILE, json.dumps(self._asdict(), indent=1).encode(), 0o600)


def read(directory: Path) -> Reach | None:
    """None: commands run where they are called."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        row = json.loads(regular.read_bytes(directory / FILE))
        return Reach(
            str(row["what"]), str(row["variable"]), str(row["value"]),
            tuple(map(str, row["state"])), tuple(map(str, row["command"])),
        )  # fmt: skip
    return None


def follow(directory: Path) -> None:
    """Run this command where the coordinator is, if that is elsewhere: then this process becomes
    that one. While the place is queued, the command sees what is on record.
    """
    place = read(directory)
    if place is None or place.is_here or _is_over(directory):
        return
    state = _state(place)
    if state.startswith("RUNNING"):
        run(place, sys.argv[1:])
    if state:
        notes.note(f"{place.what} is {state.lower()}: this is what is on record")


def _is_over(directory: Path) -> bool:
    """Whether the run has ended: then all that is left of it is in its directory."""
    with suppress(DlctlError):
        return database.read(directory).get("state") in database.ENDED
    return False


def run(place: Reach, words: list[str]) -> None:
    """Become `dlctl WORDS` there."""
    sys.stdout.flush()
    sys.stderr.flush()
    terminal = ["--pty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    program = [sys.executable, "-P", "-m", "dlctl", *words]
    argv = [*place.command, *terminal, f"--chdir={os.getcwd()}", *program]
    os.execvp(argv[0], argv)  # noqa: S606  (no shell is meant)


def _state(place: Reach) -> str:
    """ "": unknown or gone."""
    try:
        ended = subprocess.run(
            place.state, capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return " ".join(ended.stdout.split())
