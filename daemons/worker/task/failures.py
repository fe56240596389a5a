"""Errors of the user's code or a method's engine, as one line and a traceback; and the loss of
processes that a worker needs.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from daemons.worker.task.user_task import TaskError, blame, is_for_want_of_memory, text_of
from dlctl.errors import DlctlError, Unreachable
from dlctl.job.config import JobFile
from dlctl.roles.protocol.effects import TaskFailed
from dlctl.util.text import plural

KILLED = (-signal.SIGKILL, -signal.SIGTERM)
"""Return codes of a process that another process has terminated."""


class ProcessLost(DlctlError):
    """A process of this worker has exited, or does not answer; `detail` has its last lines.

    exit_code: of the worker; that of a killed worker, unless the lost process exited on its own.
    """

    exit_code = Unreachable.exit_code

    def __init__(self, message: str, detail: str = "", *, by_itself: bool = False) -> None:
        super().__init__(message)
        self.detail = detail
        if by_itself:
            self.exit_code = DlctlError.exit_code


def how_it_ended(status: int) -> str:
    """The predicate of a sentence; status: negative for a signal."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with code {status}"


def failure_of(error: BaseException) -> TaskFailed:
    """The event for an error; call this in its `except` block."""
    if is_for_want_of_memory(error) and not isinstance(error, DlctlError):
        error = blame("computing", error)
    if isinstance(error, DlctlError):
        where = f" ({error.where})" if error.where else ""
        hint = f"; {error.hint}" if error.hint else ""
        return TaskFailed(f"{error.message}{where}{hint}", getattr(error, "detail", ""))
    what = f"{type(error).__name__}: {text_of(error)}"
    if isinstance(error, Exception):
        return TaskFailed(f"a bug in dlctl: {what}", traceback.format_exc())
    return TaskFailed(f"the compute thread was interrupted by {what}", traceback.format_exc())


@contextmanager
def explained(job: JobFile, batch_size: int) -> Iterator[None]:
    """Around a step: raises TaskError with advice if memory ran out, and other errors unchanged.
    batch_size: of this worker.
    """
    try:
        yield
    except Exception as error:
        if not is_for_want_of_memory(error):
            raise
        failed = error if isinstance(error, TaskError) else blame("computing", error)
        failed.hint = _advice(job, batch_size)
        raise failed from failed.__cause__ or error


def _advice(job: JobFile, size: int) -> str:
    """Settings that need less memory; the first ones do not change the result of a step."""
    tries = []
    if size > 1:
        parts = next((n for n in range(2, size) if size % n == 0), size)
        tries.append(
            f"workers.batch_size = {size // parts} with gradient.accumulate = "
            f"{job.gradient.accumulate * parts}, for the same samples per step"
        )
    if job.gradient.precision == "fp32":
        tries.append('gradient.precision = "bf16"')
    tries.append("fewer workers on this device")
    batch = f"a batch has {plural(size, 'sample')} (workers.batch_size)"
    return f"{batch}: try {', or '.join(tries)}"
