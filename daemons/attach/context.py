"""What `dlctl.attach` finds in a process that an agent has started (`daemons.script`), and what
that process tells the session when the user's program has ended.

SIGTERM and SIGINT have Python's own handlers until a session begins: a program that has not
attached is in nothing that would have to be left in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from daemons.process import DaemonContext
from dlctl.roles.protocol.effects import TaskFailed


class ProgramEnd(NamedTuple):
    """How the user's program has ended."""

    what: str
    """As in "running train.py raised ValueError: no data", "train.py has exited with code 0"."""
    where: str
    """file:line, or the file."""
    hint: str
    code: int
    """The exit code that Python would have for it."""
    is_error: bool
    """It raised an exception, not SystemExit."""
    detail: str = ""
    """The traceback, without dlctl's own frames."""

    def failure(self, when: str, hint: str) -> TaskFailed:
        """The event for a worker that still has a part in the run. when: as in "before the run was
        over"; with `hint` it is said of a program that has ended without an error.
        """
        if self.is_error:
            when, hint = "", self.hint
        said = " ".join(filter(None, (self.what, when, f"({self.where})")))
        return TaskFailed("; ".join(filter(None, (said, hint))), self.detail)


class ScriptSession(Protocol):
    """A worker that `dlctl.attach` has begun."""

    @property
    def has_joined(self) -> bool:
        """Whether the run knows this worker; `end` is only called then."""
        ...

    def end(self, end: ProgramEnd) -> int:
        """Leave the run, in the main thread. Returns the exit code of the process, and has logged
        it if the run had to be told of a failure.
        """
        ...


@dataclass(slots=True)
class ScriptProcess:
    """This process, as its agent has started it."""

    context: DaemonContext
    session: ScriptSession | None = None
    """Set by `dlctl.attach`; None: it was not called so far."""


_started: ScriptProcess | None = None


def begin(context: DaemonContext) -> ScriptProcess:
    """From now on `started` returns this."""
    global _started
    _started = ScriptProcess(context)
    return _started


def started() -> ScriptProcess | None:
    """None: no agent has started this process."""
    return _started
