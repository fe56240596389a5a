"""How commands reach the machine of a coordinator that runs elsewhere, as in a job of a batch
system: they are run there, where all that they look at is.

`reach.json` in the run directory names the launcher and the place. What it takes to get there, the
launcher knows: nothing from a file is executed, as the directory may be from somebody else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from dlctl import registry
from dlctl.errors import DlctlError, Unreachable
from dlctl.runs import database, paths
from dlctl.runs.snapshot import Snapshot
from dlctl.util import notes, regular

FILE = "reach.json"
LAUNCHERS = "launchers"
ASK_S = 20.0


class Reach(NamedTuple):
    launcher: str
    what: str
    """Where the coordinator runs, for people: "the control job 17"."""
    variable: str
    """A process there has this variable of the environment ..."""
    value: str
    """... with this value, by which the launcher knows the place."""
    state: tuple[str, ...]
    """A command that prints the state of that place, and perhaps a reason; nothing: it is gone."""
    gone: str
    """What that command says if the place is gone, and the command fails."""
    command: tuple[str, ...]
    """What runs a command there: it follows."""

    @property
    def is_here(self) -> bool:
        return os.environ.get(self.variable) == self.value

    def write(self, directory: Path) -> None:
        """Raises OSError."""
        row = {"launcher": self.launcher, "place": self.value}
        paths.write(directory / FILE, json.dumps(row).encode(), 0o600)


def read(directory: Path) -> Reach | None:
    """None: commands run where they are called."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        row = json.loads(regular.read_bytes(directory / FILE))
        name, place = str(row["launcher"]), str(row["place"])
        if ":" not in name and registry.is_known(LAUNCHERS, name):
            found: Reach | None = registry.load(LAUNCHERS, name).reached(place)
            return found
    return None


def follow(directory: Path) -> None:
    """Run this command where the coordinator is, if that is elsewhere: then this process becomes
    that one. While the place is queued, the command sees what is on record. Raises Unreachable if
    nobody knows whether the coordinator is there: what is on record may be of long ago then, and a
    run that seems dead may be alive.
    """
    place = read(directory)
    if place is None or place.is_here or is_over(directory):
        return
    state = _state(place)
    if state.startswith("RUNNING"):
        run(place, sys.argv[1:])
    if state:
        notes.note(f"{place.what} is {state.lower()}: this is what is on record")


def seen(snapshot: Snapshot) -> Snapshot:
    """A run as it is where its coordinator is: here, that seems to be gone."""
    place = read(snapshot.directory)
    if not snapshot.is_gone or place is None or place.is_here:
        return snapshot
    try:
        state = _state(place)
    except Unreachable as error:
        return replace(snapshot, state="unknown", reason=error.message)
    if not state:
        return snapshot
    recorded, reason = str(snapshot.run.get("state")), f"{place.what} is {state.lower()}"
    is_there = state.startswith("RUNNING")
    return replace(
        snapshot, state=recorded if is_there else "recovering", reason=reason, is_live=True
    )


def is_over(directory: Path) -> bool:
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
    """ "": it is gone. Raises Unreachable if it is unknown."""
    try:
        ended = subprocess.run(
            place.state, capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        is_late = isinstance(error, subprocess.TimeoutExpired)
        why = f"no answer in {ASK_S:g} s" if is_late else str(error)
        raise _unknown(place, why) from error
    if ended.returncode == 0 or place.gone in ended.stderr:
        return " ".join(ended.stdout.split())
    raise _unknown(place, " ".join(ended.stderr.split()) or f"exit {ended.returncode}")


def _unknown(place: Reach, why: str) -> Unreachable:
    program = place.state[0]
    return Unreachable(
        f"cannot learn whether {place.what} runs, where the coordinator of this run is: {why}",
        where=program,
        hint=f"repeat it on a machine where {program} works; "
        f"if that place is gone for ever: rm {FILE} in the run directory",
    )
