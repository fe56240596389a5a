"""A worker's data: the portion that it holds, batch by batch, and which portions are done with.

A portion is done when all its gradients are in settled pushes, not when they were computed: what a
dead worker had computed and not pushed is leased to another one.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from dlctl.algorithms.base import Data
from dlctl.flat import slice_bounds
from dlctl.messages import Lease


@dataclass(slots=True)
class Portion:
    """One lease at work."""

    lease: Lease
    batch_size: int
    next_number: int = 0
    steps: int = 0
    samples: int = 0
    loss_sum: float = 0.0

    @property
    def batches(self) -> int:
        return -(-(self.lease.stop - self.lease.start) // self.batch_size)

    def batch_range(self, number: int) -> tuple[int, int]:
        """The samples [start, stop) of one batch, at most `batch_size` of them."""
        lo, hi = slice_bounds(self.lease.stop - self.lease.start, self.batches, number)
        return self.lease.start + lo, self.lease.start + hi

    def in_words(self, number: int) -> str:
        """A batch, for people."""
        start, stop = self.batch_range(number)
        return f"samples {start}..{stop - 1} of the order of epoch {self.lease.data_epoch}"

    def is_last(self, number: int) -> bool:
        return number == self.batches - 1


@dataclass(slots=True)
class Portions:
    batch_size: int
    ahead_s: float
    """Work that is leased in advance, in seconds: so long a worker goes on without coordinator."""
    current: Portion | None = None
    upcoming: deque[Portion] = field(default_factory=deque)
    _batches_upcoming: int = 0
    """Counted: they are asked for at every step, and may be a thousand short portions."""
    _computed: list[Portion] = field(default_factory=list)
    """All batches computed, not all of them pushed."""
    _pushed: dict[int, list[Portion]] = field(default_factory=dict)
    """Push number -> portions that end with it."""

    def take(self, lease: Lease) -> None:
        """A lease has come: begin with it, or keep it for when the present one has ended."""
        portion = Portion(lease, self.batch_size)
        if self.current is None:
            self.current = portion
        else:
            self.upcoming.append(portion)
            self._batches_upcoming += portion.batches

    def batches_left(self) -> int:
        """Batches at hand that are not begun."""
        current = self.current.batches - self.current.next_number if self.current else 0
        return current + self._batches_upcoming

    def not_done(self) -> int:
        """Portions at hand, or of which not everything is settled."""
        own = len(self.upcoming) + len(self._computed) + (self.current is not None)
        return own + sum(len(portions) for portions in self._pushed.values())

    def wants_more_ahead(self, batch_s: float) -> bool:
        """Whether less than `ahead_s` of work is at hand. batch_s: for a batch; 0: unknown."""
        return 0 < self.batches_left() * batch_s < self.ahead_s

    def at_boundary(self) -> bool:
        """Whether no portion is half done: a good place to stop."""
        return self.current is None or self.current.next_number == 0

    def ahead(self) -> Data | None:
        """What `next_batch` would bring, if anything."""
        if self.current is None:
            return None
        lease, is_last = self.current.lease, self.current.is_last(self.current.next_number)
        return Data(lease.data_epoch, lease.portion, is_last)

    def next_batch(self) -> tuple[Portion, int]:
        """(portion, number of the batch in it); only if there is one ahead."""
        assert self.current is not None
        number = self.current.next_number
        self.current.next_number += 1
        return self.current, number

    def finish(self, portion: Portion) -> None:
        """The last batch of the portion was computed (or refused)."""
        self._computed.append(portion)
        self.current = self.upcoming.popleft() if self.upcoming else None
        self._batches_upcoming -= self.current.batches if self.current else 0

    def pushed(self, number: int) -> None:
        """Push `number` holds everything computed so far."""
        if self._computed:
            self._pushed.setdefault(number, []).extend(self._computed)
            self._computed = []

    def refused(self, number: int) -> None:
        """A shard has left out push `number`: what ends with it is not in all of them, and has no
        loss. Who needs the gradient of a whole batch takes it for a point too far.
        """
        for portion in self._pushed.get(number, ()):
            portion.loss_sum = math.inf

    def settled(self, number: int) -> list[Portion]:
        """Push `number` is settled on every shard: the portions that are done now."""
        return self._pushed.pop(number, [])
