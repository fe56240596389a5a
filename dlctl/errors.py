"""Every error that dlctl raises on purpose, and its exit code.

    DlctlError                 1   the command failed
    ├── UsageError             2   a wrong argument, or a job file that is not valid
    ├── NotRunning             3   only `status --check`, `wait`, and a `run` that was stopped
    ├── NotFound               4   no such job, run or daemon
    ├── Unreachable            5   a daemon or a host does not answer
    ├── TimedOut               6   --timeout passed; the work may continue
    ├── JobFailed              7   the job failed, while it started or while it trained
    ├── Partial                8   done on some daemons and not on others
    ├── VersionMismatch        9   the other side speaks another protocol
    ├── NotPermitted          77   a key does not fit
    └── ProtocolError          1   a violation of the protocol between daemons
        ├── LocalProtocolError      by this process: a bug
        └── RemoteProtocolError     by the peer: its message is refused

An error states what went wrong; `where` is the place (file:line, daemon, path); `hint` is the next
step, as a command if there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DlctlError(Exception):
    exit_code = 1

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint
        if hint:
            self.add_note(hint)  # A script of the user's that runs alone ends with a traceback.


@contextmanager
def os_errors_as(what: str, where: Path, hint: str | None = None) -> Iterator[None]:
    """Turns an OSError into a DlctlError, as in "cannot write: No space left on device"."""
    try:
        yield
    except OSError as error:
        raise DlctlError(f"{what}: {error.strerror}", where=str(where), hint=hint) from error


class UsageError(DlctlError):
    exit_code = 2


class NotRunning(DlctlError):
    exit_code = 3


class NotFound(DlctlError):
    exit_code = 4


class Unreachable(DlctlError):
    exit_code = 5


class TimedOut(DlctlError):
    exit_code = 6


class JobFailed(DlctlError):
    exit_code = 7


class Partial(DlctlError):
    exit_code = 8


class VersionMismatch(DlctlError):
    exit_code = 9


class NotPermitted(DlctlError):
    exit_code = 77


class ProtocolError(DlctlError):
    """A message that the protocol does not allow."""


class LocalProtocolError(ProtocolError):
    """This process was about to break the protocol."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol; its message was refused and changed nothing."""
