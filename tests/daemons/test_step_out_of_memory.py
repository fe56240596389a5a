"""A step that there is no memory for says what to try."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch

from daemons.worker.task.failures import explained, failure_of
from daemons.worker.task.user_task import TaskError, calling
from dlctl.job.config import Gradients, Job, JobFile, Workers


def job(batch_size: int, **gradient: object) -> JobFile:
    return JobFile(
        job=Job(name="large", task="train.py:task"),
        workers=Workers(batch_size=batch_size),
        gradient=Gradients(**gradient),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("is_guarded", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
    ],
)
def test_it_names_the_batch_size_and_a_step_as_large(error: Exception, is_guarded: bool) -> None:
    guard = calling("task.loss") if is_guarded else nullcontext()
    with pytest.raises(TaskError) as caught, explained(job(64, accumulate=3), 64), guard:
        raise error
    assert type(error).__name__ in caught.value.message
    assert caught.value.hint == (
        "a batch has 64 samples (workers.batch_size): try workers.batch_size = 32 with "
        "gradient.accumulate = 6, for the same samples per step, or gradient.precision = "
        '"bf16", or fewer workers on this device'
    )


def test_what_was_tried_is_not_told() -> None:
    with pytest.raises(TaskError) as caught, explained(job(1, precision="bf16"), 1):
        raise MemoryError
    hint = caught.value.hint or ""
    assert hint == "a batch has 1 sample (workers.batch_size): try fewer workers on this device"
    with pytest.raises(TaskError) as caught, explained(job(9), 9):
        raise MemoryError
    assert re.findall(r"= (\d+)", caught.value.hint or "") == ["3", "3"]


def test_other_errors_are_as_they_were() -> None:
    error = ValueError("no")
    with pytest.raises(ValueError, match="no") as caught, explained(job(4), 4):
        raise error
    assert caught.value is error


def test_outside_of_a_step_no_smaller_batch_is_advised() -> None:
    with pytest.raises(TaskError) as caught, calling("task.model"):
        raise MemoryError
    assert caught.value.hint == "try fewer workers on this device"
    failed = failure_of(MemoryError())
    assert failed.error.startswith("computing raised MemoryError")
    assert failed.error.endswith("; try fewer workers on this device")
