"""A sample that cannot be read is named, whatever kind of error it ends in."""

from __future__ import annotations

from concurrent.futures import CancelledError

import pytest
from stepping import batch_of

from daemons.worker.data.portion_loader import PortionLoader
from daemons.worker.task.user_task import TaskError


class Cancelled(BaseException):
    """Not an Exception, as asyncio.CancelledError is not."""


class Remote:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise Cancelled if index == 2 else CancelledError


def test_an_error_that_is_no_exception_is_blamed_on_its_sample():
    loader = PortionLoader(Remote(), batch_size=1, seed=0, shuffle=False, processes=0, collate=None)
    with pytest.raises(TaskError, match=r"task\.dataset\(\)\[2\]"):
        batch_of(loader, 0, 2, 3, 0)
