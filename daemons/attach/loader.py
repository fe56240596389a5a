"""`run.loader`: torch's DataLoader over what is leased, for as long as the run lasts.

torch fetches ahead, so its batch sampler must never wait for data: what is on its way would not be
delivered meanwhile, and would never be settled. Where it would have to wait, torch's pass ends. The
loader delivers the rest of the pass, waits for data itself, and begins another pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from daemons.attach.batch_source import IN_ORDER, BatchSource, Feed
from daemons.worker.data.sample_order import SampleOrder

_CPU = torch.device("cpu")
_ORDER = "which samples come, and in which order, is the run's: [data] shuffle of the job file"
REFUSED = {
    "shuffle": _ORDER,
    "sampler": _ORDER,
    "batch_sampler": "the run cuts the batches: give batch_size, or use "
    "DataLoader(dataset, batch_sampler=run.batches(dataset, batch_size))",
    "drop_last": "every sample is trained, so a batch may be smaller where data ends",
    "in_order": IN_ORDER,
}


class Loader:
    """Batches of a dataset until the run is over. What was fetched and not delivered before a
    `break`, or an exception, comes again in the next iteration.

    It has no length. With `num_workers`, its processes stay from pass to pass unless
    `persistent_workers=False`. Call `close` to end them.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        feed: Feed,
        order: SampleOrder,
        **options: Any,
    ) -> None:
        """options: of torch's DataLoader. Raises TypeError, ValueError, DlctlError."""
        for name in options.keys() & REFUSED.keys():
            raise TypeError(f"run.loader: remove {name}=; {REFUSED[name]}")
        processes = options.get("num_workers", 0)
        if processes:
            options.setdefault("persistent_workers", True)
        self._seeds = None if options.get("generator") else torch.Generator()
        """Of torch's passes, of which there are more in some runs than in others: without it each
        would take a number of the user's generator."""
        options["generator"] = options.get("generator") or self._seeds
        self._source = BatchSource(dataset, batch_size, feed=feed, order=order, drops=True)
        self.dataset, self.batch_size = dataset, self._source.batch_size
        self._made = partial(DataLoader, dataset, batch_sampler=_Takes(self._source), **options)
        self._loader: DataLoader[Any] = self._made()
        self._source.ahead = processes * (self._loader.prefetch_factor or 0)
        self._batches: Iterator[Any] | None = None
        """torch's pass; None: another one has to begin."""
        self._is_seeded = self._seeds is None

    def __iter__(self) -> Iterator[Any]:
        if self._seeds is not None and not self._is_seeded:
            self._is_seeded = True
            self._seeds.manual_seed(int(torch.empty((), dtype=torch.int64, device=_CPU).random_()))
        self._batches = None
        return _Iteration(self, self._source.begin())

    def next_of(self, iteration: int) -> Any:
        """The next batch of an iteration. Raises StopIteration, and what the dataset raises."""
        source = self._source
        if source.is_over():
            raise StopIteration
        if not source.is_current(iteration):
            raise RuntimeError(
                "this iteration over the run's data has ended, because another one has begun since;"
                " a run has one stream of batches: take them in one loop at a time"
            )
        while self._batches is not None or source.await_batch():
            try:
                if self._batches is None:
                    self._batches = self._pass()
                batch = next(self._batches)
            except StopIteration as error:
                self._batches = None
                if source.has_on_way():
                    source.take_back()
                    raise RuntimeError(
                        "the dataset, or collate_fn, raised StopIteration"
                    ) from error
                continue
            except BaseException:
                source.take_back()
                self.close()  # One of its processes may have been killed.
                raise
            if source.deliver():
                return batch
            source.take_back()
            self._batches = None
        raise StopIteration

    def close(self) -> None:
        """End the loader's processes; another iteration would start others."""
        # torch ends them when nothing refers to its pass, but a traceback may, for ever.
        getattr(self._batches, "_shutdown_workers", _nothing)()
        self._batches = None
        self._loader = self._made()

    def _pass(self) -> Iterator[Any]:
        is_default = torch.get_default_device() == _CPU
        with nullcontext() if is_default or self._seeds is None else _CPU:
            return iter(self._loader)


def _nothing() -> None:
    """A pass without processes has none to end."""


class _Takes:
    """torch's batch sampler: a pass ends where it would have to wait."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source

    def __iter__(self) -> Iterator[list[int]]:
        while rows := self._source.take():
            yield rows


class _Iteration:
    def __init__(self, loader: Loader, number: int) -> None:
        self._loader, self._number = loader, number

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._loader.next_of(self._number)
