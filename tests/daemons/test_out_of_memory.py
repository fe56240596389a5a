"""A step that there is no memory for says what to try."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from daemons.worker.failures import failure_of
from daemons.worker.task import blame, calling

ADVICE = "a smaller workers.batch_size, with a larger gradient.accumulate"


@pytest.mark.parametrize("is_guarded", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
    ],
)
def test_it_says_what_to_try(error: Exception, is_guarded: bool) -> None:
    try:
        with calling("task.loss") if is_guarded else nullcontext():
            raise error
    except Exception as raised:
        failed = failure_of(raised)
    assert (
        f"{'task.loss' if is_guarded else 'computing'} raised {type(error).__name__}"
        in failed.error
    )
    assert ADVICE in failed.error


def test_other_errors_have_no_such_advice() -> None:
    assert ADVICE not in failure_of(RuntimeError("no")).error
    assert ADVICE not in (blame("task.loss", RuntimeError("no")).hint or "")
