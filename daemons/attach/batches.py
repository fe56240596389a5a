"""`run.batches`: a batch sampler for a DataLoader of the user's own.

A batch sampler is asked for batches and not told what becomes of them. But torch asks in a fixed
manner: for as many batches as it fetches ahead when a pass begins, then for one more whenever it
delivers one. So the asks, less those in advance, count the batches that the loop has.

What is promised: as with `run.loader`, a sample is settled by the `run.step` after its delivery,
and what was fetched and never delivered comes again. An error that the dataset raises, and that the
script survives, is not seen: that batch counts as delivered.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, dataloader

from daemons.attach.batch_source import IN_ORDER, BatchSource, Feed
from daemons.worker.data.sample_order import SampleOrder


class Batches:
    """The rows of each batch. A pass ends where it would have to wait for data, so a pass is made
    again and again until the run is over; it waits where it begins. It has no length.

    ahead: how many batches whoever iterates over it fetches in advance; None: as torch's DataLoader
    does, num_workers * prefetch_factor. Something around a DataLoader may fetch more (accelerate
    does, one).
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        feed: Feed,
        order: SampleOrder,
        ahead: int | None = None,
    ) -> None:
        """Raises TypeError, ValueError, DlctlError."""
        self._source = BatchSource(dataset, batch_size, feed=feed, order=order, drops=False)
        self.batch_size = self._source.batch_size
        self._ahead = ahead

    def __iter__(self) -> Iterator[list[int]]:
        return _Pass(self._source, self._ahead)


class _Pass:
    """It begins with the first ask: torch makes two of them, and is upset by an error meanwhile."""

    def __init__(self, source: BatchSource, ahead: int | None) -> None:
        self._source, self._ahead = source, ahead
        self._number = self._asked = 0
        self._has_ended = False

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        """torch goes on asking when the pass has ended: that too means that it has delivered."""
        source = self._source
        if not self._asked:
            source.ahead = _torch_ahead() if self._ahead is None else self._ahead
            self._number = source.begin()
            source.await_batch()
        if not source.is_current(self._number) or source.is_over():
            raise StopIteration
        self._asked += 1
        rows = [] if self._has_ended else source.take()
        self._has_ended = not rows
        if self._asked > source.ahead:
            source.deliver()
        if not rows:
            raise StopIteration
        return rows


def _torch_ahead() -> int:
    """Batches that the DataLoader fetches ahead whose processes get their first ones just now; 0:
    there is none. Raises TypeError.

    It gives its batch sampler no sign of itself, so it is looked for among the callers.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        loader = frame.f_locals.get("loader")
        is_torch = frame.f_globals.get("__name__") == dataloader.__name__
        if is_torch and isinstance(loader, DataLoader):
            if not loader.in_order:
                raise TypeError(f"run.batches: remove in_order= of the DataLoader; {IN_ORDER}")
            return loader.num_workers * (loader.prefetch_factor or 0)
        frame = frame.f_back
    return 0
