"""A step that there is no memory for, on a GPU or on the machine: what to try in the job file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from daemons.worker.task import TaskError, blame
from dlctl.config import JobFile
from dlctl.util.text import plural

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
