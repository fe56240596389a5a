"""A wrapper of a server optimiser: a buffer, an average, a correction of the gradients.

Its own slots follow those of the optimiser, and its counters are beside the optimiser's: for a
storage, and for a journal, the two are one optimiser.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from dlctl.job.settings import Setting
from dlctl.optim.base import Optimizer
from dlctl.optim.blocks import Rule
from dlctl.wire.messages import Array, Json


class Wrapping(ABC):
    Options: ClassVar[type[Any]] = object
    live: ClassVar[Mapping[str, Setting]] = {}

    def __init__(
        self, inner: Optimizer, slots: Iterable[str], counters: Mapping[str, int] | None = None
    ) -> None:
        """slots: its own, zeros at first. counters: its own."""
        self.inner = inner
        self.slots: Mapping[str, float] = {**inner.slots, **dict.fromkeys(slots, 0.0)}
        self.counters: Json = inner.counters
        self.counters |= counters or {}

    @property
    def lr(self) -> float:
        return self.inner.lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self.inner.lr = lr

    def sweeps_next(self) -> bool:
        """What others have pushed is not only where the last push is."""
        return True

    @abstractmethod
    def begin_update(self) -> Rule:
        """Begin an update of the inner optimiser (`Optimizer.begin_update`)."""


def keep(array: Array, following: Array) -> None:
    """Copy a value that an update does not change."""
    if following is not array:
        following[:] = array
