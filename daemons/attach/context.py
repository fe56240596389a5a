"""What `dlctl.attach` finds in a process that an agent has started (`daemons.script`), and what
that process tells the session when the user's program has ended.

SIGTERM and SIGINT have Python's own handlers until a session begins: a program that has not
attached is in nothing that would have to be left in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from daemons.process import DaemonContext
from dlctl.job.config import JobFile
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
        """Whether the run knows this worker; `end` and `fail` are only called then."""
        ...

    @property
    def is_over(self) -> bool:
        """The run is over for this worker, so its program may end."""
        ...

    def fail(self, failed: TaskFailed) -> int:
        """Leave the run with this failure. In any thread but that of the role; returns as `end`."""
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


class LoopState(Protocol):
    @property
    def is_over(self) -> bool:
        """The run is over for this worker, so its program may end."""
        ...


@dataclass(slots=True)
class LaterProcess:
    """This process, as one of several of a worker: its rank 0 has started it."""

    job: JobFile
    rank: int
    session: LoopState | None = None
    """Set by `dlctl.attach`."""


_started: ScriptProcess | None = None
_later: LaterProcess | None = None


def begin(context: DaemonContext) -> ScriptProcess:
    """From now on `started` returns this."""
    global _started
    _started = ScriptProcess(context)
    return _started


def begin_later(job: JobFile, rank: int) -> LaterProcess:
    """From now on `later` returns this."""
    global _later
    _later = LaterProcess(job, rank)
    return _later


def later() -> LaterProcess | None:
    """None: this is no later rank of a worker."""
    return _later


def started() -> ScriptProcess | None:
    """None: no agent has started this process."""
    return _started
