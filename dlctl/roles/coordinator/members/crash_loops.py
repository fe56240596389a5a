"""Detects workers that repeatedly exit on their own in the same way.

If a process is killed from outside, or its host is out of memory, the machine is the cause: the
next process may live. If processes repeatedly exit with the same code, or crash with the same
signal, the code that they run is the cause: the task, a library, or dlctl. Such deaths count even
if the worker trained in between, since the task may take that long to reach the fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlctl.errors import NotPermitted, Unreachable, VersionMismatch
from dlctl.roles.protocol.context import EXIT_FENCED, EXIT_POISONED, EXIT_RESTART
from dlctl.util.text import ALIKE_LIFE_S, BLAMED, ordinal

UNSAID = "without a word"
"""The cause of an exit that is not in the log: dlctl logs its own exits, with their codes."""
NO_ROOM = "no space left for its log"
"""The cause if the agent could not even start a process."""
_OF_DLCTL = frozenset(
    (
        EXIT_FENCED, EXIT_POISONED, EXIT_RESTART,
        NotPermitted.exit_code, Unreachable.exit_code, VersionMismatch.exit_code,
    )
)  # fmt: skip
"""Codes whose cause is another process or the network, not the task."""
_CRASHES = frozenset((-4, -5, -6, -7, -8, -11, -31))
"""SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGSYS: raised by the process itself."""


def ends_by_itself(status: int, cause: str) -> bool:
    """Whether the process itself caused its end. Code 0 means a requested exit, unless its log does
    not mention it.
    """
    if cause == NO_ROOM:
        return False
    if status == 0:
        return cause == UNSAID
    return status in _CRASHES or (status > 0 and status not in _OF_DLCTL)


def in_row(before: Mapping[str, Any] | None, status: int, cause: str, lived_s: float) -> int:
    """How often in a row a daemon has exited like this, this time included; 0 if the process did
    not cause its exit. `before`: the `last_exit` of the previous process, or None.
    """
    if not ends_by_itself(status, cause):
        return 0
    if before is None or before.get("code") != status or lived_s > ALIKE_LIFE_S:
        return 1
    number = before.get("in_row")
    return number + 1 if type(number) is int else 1


def blame(last_exit: Mapping[str, Any]) -> str:
    """How often in a row a daemon has exited like this, and the cause: the rest of a sentence about
    an exit, as in ", for the 4th time in a row: something in the task ends the process"; "" if
    there is nothing to add.
    """
    number = last_exit.get("in_row", 0)
    times = f", for the {ordinal(number)} time in a row" if number > 1 else ""
    why = f": {BLAMED} (os._exit, or a library)" if last_exit.get("cause") == "task" else ""
    return f"{times}{why}"
