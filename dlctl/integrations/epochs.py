"""What frameworks that count epochs get of a run's data, which has no end of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from dlctl.errors import DlctlError

KEPT = ("num_workers", "collate_fn", "timeout", "worker_init_fn", "multiprocessing_context",
        "prefetch_factor", "persistent_workers")  # fmt: skip
"""Options of torch's DataLoader that do not say which samples come."""


class EpochShare:
    """Each iteration over it has as many batches as this worker's even share of the dataset, in
    batches of `run.loader`; the last one ends with the run.

    A framework's epochs are of equal length by it, in all workers; which samples come is the run's.
    """

    def __init__(
        self,
        run: Any,
        loader: DataLoader[Any],
        batch_size: int,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """loader: as the framework has made it for this process alone. at_end: called when the run
        has ended, which may be seen nowhere else: where it does so between two epochs, no step
        follows. Raises DlctlError.
        """
        options = {name: getattr(loader, name) for name in KEPT}
        if not loader.num_workers:
            del options["persistent_workers"]  # run.loader keeps them, unless it is told not to.
        pins = loader.pin_memory and _has_accelerator()
        self.dataset, self.batch_size = loader.dataset, batch_size
        self._loader = run.loader(loader.dataset, batch_size, pin_memory=pins, **options)
        samples: int = len(loader.dataset)  # type: ignore[arg-type]
        self._batches: int = max(-(-samples // (batch_size * run.workers)), 1)
        self._stream: Iterator[Any] | None = None
        self._at_end = at_end

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        if self._stream is None:
            self._stream = iter(self._loader)
        count = 0
        for batch in islice(self._stream, self._batches):
            count += 1
            yield batch
        if count < self._batches:
            self._at_end()


def of_step(batches: Iterator[Any], run: Any, of: int) -> Iterator[Any]:
    """The next batches, up to the end of the step that accumulates gradients of `of` of them, or of
    fewer where data ends.
    """
    for batch in batches:
        yield batch
        if run.micro(of=of):
            return


def refuse(what: str, why: str, instead: str) -> DlctlError:
    """The error for an option of a framework that does not work in a run."""
    return DlctlError(f"{what} does not work in a run: {why}", hint=instead)


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()
