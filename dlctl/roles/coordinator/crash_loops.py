"""Workers that end by themselves, again and again in the same way.

Who is killed from outside, or whose host has no memory left, dies of the machine: the next process
may live for ever. Who ends by itself with the same exit code, or crashes with the same signal, time
after time, dies of what it runs: the task, a library, or dlctl. To have been at work in between is
no excuse then, for the task may just need so long to get there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlctl.errors import NotPermitted, Unreachable, VersionMismatch
from dlctl.roles.protocol.context import EXIT_FENCED, EXIT_POISONED, EXIT_RESTART
from dlctl.util.text import ALIKE_LIFE_S, BLAMED, ordinal

UNSAID = "without a word"
"""The cause of an exit that no log tells of: dlctl writes down that it ends, and with what code."""
_OF_DLCTL = frozenset(
    (
        EXIT_FENCED, EXIT_POISONED, EXIT_RESTART,
        NotPermitted.exit_code, Unreachable.exit_code, VersionMismatch.exit_code,
    )
)  # fmt: skip
"""Codes that say something of other processes, or of the network, and nothing of the task."""
_CRASHES = frozenset((-4, -5, -6, -7, -8, -11, -31))
"""SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGSYS: what a process does to itself."""


def ends_by_itself(status: int, cause: str) -> bool:
    """Whether that was the process's own doing. Only an end that was asked for has code 0, unless
    its log says nothing of it.
    """
    if status == 0:
        return cause == UNSAID
    return status in _CRASHES or (status > 0 and status not in _OF_DLCTL)


def in_row(before: Mapping[str, Any] | None, status: int, cause: str, lived_s: float) -> int:
    """How often in a row that has happened, this time included; 0 if it was not its own doing.

    `before`: the `last_exit` of the process before, or None.
    """
    if not ends_by_itself(status, cause):
        return 0
    if before is None or before.get("code") != status or lived_s > ALIKE_LIFE_S:
        return 1
    number = before.get("in_row")
    return number + 1 if type(number) is int else 1


def blame(status: int, number: int, said: str) -> str:
    """How often in a row that was (`in_row`), and whose doing: the rest of a sentence about an end,
    as in ", for the 4th time in a row: something in the task ends the process"; "" if there is
    nothing to say.

    `said`: what the process itself has said of its end.
    """
    times = f", for the {ordinal(number)} time in a row" if number > 1 else ""
    why = f": {BLAMED} (os._exit, or a library)" if is_of_task(status, number, said) else ""
    return f"{times}{why}"


def is_of_task(status: int, number: int, said: str) -> bool:
    """Whether something in the task has ended the process, which is not said of a crash: what that
    was of, its last words may tell.
    """
    return status >= 0 and number > 0 and not said
