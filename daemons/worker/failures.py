"""What the user's code or a method's engine has raised, as one line and a traceback; and processes
that a worker cannot go on without.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from daemons.worker.task import TaskError, blame
from dlctl.config import JobFile
from dlctl.errors import DlctlError, Unreachable
from dlctl.roles.protocol.effects import TaskFailed
from dlctl.util.text import plural

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


CPU_ALLOCATOR = "DefaultCPUAllocator"
"""Where torch has no memory for a tensor on the CPU, it raises a RuntimeError that names this."""


@contextmanager
def explained(job: JobFile, batch_size: int) -> Iterator[None]:
    """Around a step: an error that is for want of memory says what to try. batch_size: of this
    worker. Raises TaskError for it, and everything else as it is.
    """
    try:
        yield
    except Exception as error:
        if not is_for_want_of_memory(error):
            raise
        is_told = isinstance(error, TaskError)
        failed = error if isinstance(error, TaskError) else blame("a step", error)
        failed.hint = advice(job, batch_size)
        raise failed from (error.__cause__ if is_told else error)


def is_for_want_of_memory(error: BaseException | None) -> bool:
    """Also of a TaskError, which has been caused by such an error."""
    if isinstance(error, TaskError):
        error = error.__cause__
    if isinstance(error, RuntimeError) and CPU_ALLOCATOR in str(error):
        return True
    return isinstance(error, MemoryError | torch.OutOfMemoryError)


def advice(job: JobFile, batch_size: int) -> str:
    """What needs less memory and leaves what comes of a step as it is, as far as there is such."""
    size, accumulate = batch_size, job.gradient.accumulate
    tries = []
    if size > 1:
        parts = next((n for n in range(2, size) if size % n == 0), size)
        tries.append(
            f"workers.batch_size = {size // parts} with gradient.accumulate = "
            f"{accumulate * parts}, which leaves the step as large"
        )
    if job.gradient.precision == "fp32":
        tries.append('gradient.precision = "bf16"')
    tries.append("fewer workers on this device")
    batch = f"a batch has {plural(size, 'sample')} (workers.batch_size)"
    return f"{batch}: try {', or '.join(tries)}"
