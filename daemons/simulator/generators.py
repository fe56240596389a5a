"""The random generators of many workers in one process: torch's, numpy's and Python's."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class Generators:
    """Each worker draws as if it had its process for itself."""

    def __init__(self) -> None:
        self._whose: Hashable = None
        self._kept: dict[Hashable, Any] = {}

    @contextmanager
    def of(self, worker: Hashable) -> Iterator[None]:
        """Within the block the generators are those of this worker; a new one inherits the states
        of the last, as a process does that seeds them next.
        """
        if worker != self._whose:
            self._kept[self._whose] = _states()
            self._whose = worker
            if worker in self._kept:
                _restore(self._kept.pop(worker))
        yield

    def forget(self, worker: Hashable) -> None:
        """The process of this worker has ended."""
        self._kept.pop(worker, None)


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _restore(states: tuple[Any, ...]) -> None:
    of_torch, of_numpy, of_python = states
    torch.set_rng_state(of_torch)
    np.random.set_state(of_numpy)
    random.setstate(of_python)
