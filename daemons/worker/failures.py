"""What the user's code or a method's engine has raised, as one line and a traceback; and processes
that a worker cannot go on without.
"""

from __future__ import annotations

import signal
import traceback

from dlctl.errors import DlctlError, Unreachable
from dlctl.roles.protocol.effects import TaskFailed

KILLED = (-signal.SIGKILL, -signal.SIGTERM)
"""What a process ends with that somebody else has ended."""


class ProcessLost(DlctlError):
    """A process of this worker's has ended, or does not answer; `detail` has its last lines.

    exit_code: what the worker ends with; as of one that was killed, unless the process itself is to
    blame.
    """

    exit_code = Unreachable.exit_code

    def __init__(self, message: str, detail: str = "", *, by_itself: bool = False) -> None:
        super().__init__(message)
        self.detail = detail
        if by_itself:
            self.exit_code = DlctlError.exit_code


def how_it_ended(status: int) -> str:
    """As the rest of a sentence; status: negative for a signal."""
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"has ended with exit code {status}"


def failure_of(error: BaseException) -> TaskFailed:
    """To be called while it is handled."""
    if isinstance(error, DlctlError):
        where = f" ({error.where})" if error.where else ""
        hint = f"; {error.hint}" if error.hint else ""
        return TaskFailed(f"{error.message}{where}{hint}", getattr(error, "detail", ""))
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, Exception):
        return TaskFailed(f"a bug in dlctl: {what}", traceback.format_exc())
    return TaskFailed(f"something ended the computing with {what}", traceback.format_exc())
