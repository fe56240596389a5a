"""One data epoch of a stream: how far each of its shards has been read.

Portion p has samples [i n, (i + 1) n) of shard p mod S, with i = p div S, S shards and n samples in
a portion; behind what was done in portions of another size, if the run resumes with another one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dlctl.roles.coordinator.pools.data_pool import UNKNOWN


class PortionSizes(NamedTuple):
    """How the shards are cut into portions, and portions into steps."""

    shards: int
    portion_samples: int
    step_samples: int

    def steps(self, samples: int) -> int:
        return -(-samples // self.step_samples)


class PortionLimits(NamedTuple):
    """The limits of the run in samples and steps, rounded up to portions."""

    samples: float = math.inf
    steps: float = math.inf

    def are_reached(self, samples: int, steps: int) -> bool:
        return samples >= self.samples or steps >= self.steps

    def left(self, samples: int, steps: int, cut: PortionSizes) -> float:
        """Portions that are left after so many samples and steps."""
        n = cut.portion_samples
        return min((self.samples - samples) / n, (self.steps - steps) / cut.steps(n))

    def progress(self, samples: int, steps: int) -> float | None:
        """0..1; None without a limit."""
        if self.samples == self.steps == math.inf:
            return None
        return min(1.0, max(samples / self.samples, steps / self.steps))


@dataclass(slots=True)
class StreamShard:
    base: int = 0
    """Samples before its first portion: they were done in portions of another size."""
    next: int = 0
    """Index of the first portion that has never been leased."""
    done_to: int = 0
    """All portions before this index are done."""
    end: int = UNKNOWN
    """Upper bound of its samples: a worker that found none at some offset has not seen the end."""
    done: set[int] = field(default_factory=set)
    """Portions behind `done_to` that are done, too."""

    def to_json(self) -> list[Any]:
        """The progress in this shard, for a checkpoint."""
        return [self.base, self.done_to, self.end, sorted(self.done)]


class Pass:
    def __init__(self, cut: PortionSizes) -> None:
        self.cut = cut
        self.shards = [StreamShard() for _ in range(cut.shards)]
        self.outstanding = 0
        """Portions that are leased or returned and do not begin behind the end of their shard."""
        self._outstanding: dict[int, set[int]] = {}
        """Shard -> indices of these portions."""
        self._incomplete = set(range(cut.shards))

    def set(self, number: int, shard: StreamShard) -> None:
        """Restore a shard as a previous coordinator has recorded it."""
        self.shards[number] = shard
        self._check(number)

    # ------------------------------------------------------------ portions

    def place(self, portion: int) -> tuple[StreamShard, int]:
        """The shard of a portion, and the portion's index there."""
        return self.shards[portion % self.cut.shards], portion // self.cut.shards

    def bounds(self, portion: int) -> tuple[int, int]:
        shard, index = self.place(portion)
        n = self.cut.portion_samples
        return shard.base + index * n, shard.base + (index + 1) * n

    def is_behind(self, portion: int) -> bool:
        """Whether a portion begins behind the end of its shard."""
        shard, _ = self.place(portion)
        return shard.end != UNKNOWN and self.bounds(portion)[0] >= shard.end

    def has_more(self, number: int) -> bool:
        shard = self.shards[number]
        begin = shard.base + shard.next * self.cut.portion_samples
        return shard.end == UNKNOWN or begin < shard.end

    def advance(self, number: int) -> int | None:
        """The next portion of a shard; None if it was done before."""
        shard = self.shards[number]
        index, shard.next = shard.next, shard.next + 1
        is_new = index >= shard.done_to and index not in shard.done
        return index * self.cut.shards + number if is_new else None

    def may_be_done(self, portion: int) -> bool:
        """Whether a portion was leased, and is not known to be done."""
        shard, index = self.place(portion)
        return shard.done_to <= index < shard.next and index not in shard.done

    def is_done_ahead(self, portion: int) -> bool:
        """Whether a portion is done, and an earlier one of its shard is not."""
        shard, index = self.place(portion)
        return index in shard.done

    def mark(self, portion: int) -> list[int]:
        """A portion is done. Returns the portions that `done_to` of its shard covers since."""
        shard, index = self.place(portion)
        number, before = portion % self.cut.shards, shard.done_to
        shard.done.add(index)
        while shard.done_to in shard.done:
            shard.done.remove(shard.done_to)
            shard.done_to += 1
        self._check(number)
        return [i * self.cut.shards + number for i in range(before, shard.done_to)]

    def lease_rest(self) -> list[int]:
        """The unfinished portions, in order, of a pass whose ends are known: all of them count as
        leased.
        """
        found = []
        for number, shard in enumerate(self.shards):
            portions = -(-(shard.end - shard.base) // self.cut.portion_samples)
            shard.next = max(portions, shard.done_to)
            indices = (i for i in range(shard.done_to, portions) if i not in shard.done)
            found += [index * self.cut.shards + number for index in indices]
        return sorted(found)

    # ------------------------------------------------------------ what is outstanding

    def expect(self, portion: int) -> None:
        """A portion is leased, or waits to be."""
        if not self.is_behind(portion):
            of_shard = self._outstanding.setdefault(portion % self.cut.shards, set())
            self.outstanding -= len(of_shard)
            of_shard.add(portion // self.cut.shards)
            self.outstanding += len(of_shard)

    def forget(self, portion: int) -> None:
        of_shard = self._outstanding.get(portion % self.cut.shards, set())
        self.outstanding -= len(of_shard)
        of_shard.discard(portion // self.cut.shards)
        self.outstanding += len(of_shard)

    # ------------------------------------------------------------ ends

    def end_at(self, number: int, end: int) -> bool:
        """A shard has at most `end` samples. The smallest report counts; whether it is this."""
        shard = self.shards[number]
        if shard.end != UNKNOWN and end >= shard.end:
            return False
        shard.end = end
        for index in list(self._outstanding.get(number, ())):
            portion = index * self.cut.shards + number
            if self.is_behind(portion):
                self.forget(portion)
        self._check(number)
        return True

    def is_empty(self) -> bool:
        """Whether all shards are known to have no samples."""
        return not any(shard.end for shard in self.shards)

    def _check(self, number: int) -> None:
        """A shard has changed: it may be complete."""
        shard = self.shards[number]
        done_to = shard.base + shard.done_to * self.cut.portion_samples
        if shard.end != UNKNOWN and done_to >= shard.end:
            self._incomplete.discard(number)

    def is_complete(self) -> bool:
        return not self._incomplete

    # ------------------------------------------------------------ figures

    def counted(self) -> tuple[int, int]:
        """Samples and steps that are done."""
        of_shards = [self._counted(shard) for shard in self.shards]
        return sum(n for n, _ in of_shards), sum(n for _, n in of_shards)

    def length(self, portion: int) -> int:
        """Samples of a portion; its full size while the end of the shard is unknown."""
        return self._length(*self.place(portion))

    def _length(self, shard: StreamShard, index: int) -> int:
        n = self.cut.portion_samples
        return n if shard.end == UNKNOWN else max(0, min(shard.end - shard.base - index * n, n))

    def _counted(self, shard: StreamShard) -> tuple[int, int]:
        n = self.cut.portion_samples
        most = n * shard.done_to
        if shard.end != UNKNOWN:
            most = max(min(most, shard.end - shard.base), 0)
        full, rest = divmod(most, n)
        lengths = [shard.base, rest, *(self._length(shard, index) for index in shard.done)]
        return full * n + sum(lengths), full * self.cut.steps(n) + sum(map(self.cut.steps, lengths))


class Readers:
    """Which slot reads which shard of the newest data epoch."""

    def __init__(self, order: Sequence[int]) -> None:
        """order: the shards in the order in which they are begun."""
        self._reading: dict[int, int] = {}
        self._readers: Counter[int] = Counter()
        self._unread = list(order)
        """The shards that may have more to read, in that order."""

    def of(self, slot: int) -> int | None:
        return self._reading.get(slot)

    def read(self, slot: int, number: int) -> None:
        self.leave(slot)
        self._reading[slot] = number
        self._readers[number] += 1

    def leave(self, slot: int) -> None:
        if (number := self._reading.pop(slot, None)) is not None:
            self._readers[number] -= 1

    def choose(self, slot: int, shards: Pass) -> int | None:
        """The shard to read next, its own or one with few readers; None: all have ended."""
        own = self.of(slot)
        if own is not None and shards.has_more(own):
            return own
        self._unread = [n for n in self._unread if shards.has_more(n)]
        if not self._unread:
            return None
        few = min(self._unread, key=lambda n: (self._readers[n], shards.shards[n].next))
        self.read(slot, few)
        return few
