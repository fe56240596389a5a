"""The data of a run whose dataset is a stream: shards of unknown length, each in its own order.

A portion is a range of one shard, determined by its number: portion p has samples [i n, (i + 1) n)
of shard p mod S, with i = p div S, S shards and n samples in a portion. A worker keeps reading its
shard, so that it need not skip; a worker without a shard, or whose shard has ended, takes the shard
with the fewest other readers, the first of them in the order of the run. The worker that reaches
the end of a shard reports it: nothing behind the end is leased any more, and leased portions behind
it are empty.

If all shards end before the run, they are read again: that is the next data epoch. So every sample
is leased at least once per data epoch, and exactly once if nothing fails, provided that the stream
yields the same samples in the same order whenever it is opened.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dlctl.errors import RemoteProtocolError
from dlctl.messages import Json
from dlctl.roles.coordinator.portions import DONE, RETURNED, Key, Leases, Range

UNKNOWN = -1
"""The end of a shard that no worker has reached."""
_COMPLETE, _FIRST_SHARD = -1, -2
"""In place of a portion's number: the whole data epoch; the state of shard 0 (of shard n:
_FIRST_SHARD - n)."""


@dataclass(slots=True)
class _Shard:
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


_NEW, _EMPTY = (0, 0, UNKNOWN, ()), (0, 0, 0, ())
"""A shard that nobody has read, and one without samples, as in a checkpoint."""


def _saved(shard: _Shard) -> list[Any]:
    return [shard.base, shard.done_to, shard.end, sorted(shard.done)]


@dataclass(slots=True)
class StreamPool(Leases):
    shards: int
    portion_samples: int
    step_samples: int
    samples_max: float = math.inf
    """Limits of the run in samples and steps, rounded up to portions."""
    steps_max: float = math.inf
    order: Sequence[int] = ()
    """The shards in the order in which they are begun; (): by their numbers."""
    samples_done: int = 0
    steps_done: int = 0
    failed: str = ""
    """Why the data has ended before the limits."""
    _epoch: int = 0
    """The newest data epoch."""
    _passes: dict[int, list[_Shard]] = field(default_factory=dict)
    """The data epochs that are not complete."""
    _complete: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Data epoch -> its samples and steps."""
    _reading: dict[int, int] = field(default_factory=dict)
    """Slot -> the shard that it reads."""

    def __post_init__(self) -> None:
        self.order = self.order or range(self.shards)
        self._begin_pass(0)

    # ------------------------------------------------------------ leases

    def take(self, slot: int) -> Range | None:
        """Lease the next portion; None if none is free now (some may still be returned)."""
        key = self._take_returned(slot) or self._advance(slot)
        if key is None:
            return None
        self._lease(key, slot)
        epoch, portion = key
        start, stop = self._bounds(*key)
        return Range(epoch, portion, start, stop, portion % self.shards)

    def may_hoard(self, slot: int, slots: int) -> bool:
        """Whether `slot` may prefetch one more portion: it has at most its share of what is left,
        as far as known. slots: number of workers that share the rest.
        """
        held = sum(owner == slot for owner in self._leased.values())
        samples, steps = self._with_outstanding()
        left = min(
            (self.samples_max - samples) / self.portion_samples,
            (self.steps_max - steps) / self._portion_steps,
        )
        return held * slots <= left

    def bounds(self, portion: int) -> tuple[int, int]:
        """Samples [start, stop) of the shard, if nothing was done before in other portions."""
        index = portion // self.shards
        return index * self.portion_samples, (index + 1) * self.portion_samples

    def release(self, slot: int) -> list[Key]:
        """The worker of `slot` is gone: its unfinished portions are returned."""
        self._reading.pop(slot, None)
        back = Leases.release(self, slot)
        self._drop_what_is_behind()
        return back

    def finish(self, data_epoch: int, portion: int, end: int = UNKNOWN) -> bool:
        """A portion is done; end: of its shard, if the shard ends in it. False if it was done
        before, or was never leased.
        """
        key = (data_epoch, portion)
        number, index = portion % self.shards, portion // self.shards
        if end != UNKNOWN:
            self.ended(data_epoch, number, end)
        self._changed[key] = None
        self._forget(key)
        if data_epoch not in self._passes:
            return False
        shard = self._passes[data_epoch][number]
        if not shard.done_to <= index < shard.next or index in shard.done:
            return False
        if not self._is_behind(*key):
            read = self._length(shard, index)
            self.samples_done += read
            self.steps_done += self._steps(read)
            self._mark(data_epoch, number, index)
        return True

    def on_end(self, slot: int, data_epoch: int, number: int, end: int) -> None:
        """A worker has found the end of a shard. It is believed if that is in a portion of it."""
        shards = self._passes.get(data_epoch)
        if shards is None or not 0 <= number < self.shards:
            return
        index = (end - shards[number].base) // self.portion_samples
        # At the boundary of two portions the shard may end in either.
        for portion in ((i * self.shards + number) for i in (index, index - 1)):
            may_finish = self.may_finish(slot, data_epoch, portion)
            if may_finish and self._may_end_in(data_epoch, portion, end):
                self.ended(data_epoch, number, end)

    def check_end(self, data_epoch: int, portion: int, end: int) -> None:
        """Raises RemoteProtocolError if a shard with `end` samples does not end in this portion."""
        if not self._may_end_in(data_epoch, portion, end):
            raise RemoteProtocolError(f"sample {end} is not in portion {portion}")

    def _may_end_in(self, data_epoch: int, portion: int, end: int) -> bool:
        """True also if the data epoch is complete: then it does not matter."""
        if data_epoch not in self._passes:
            return True
        start, stop = self._bounds(data_epoch, portion)
        return start <= end <= stop

    def ended(self, data_epoch: int, number: int, end: int) -> None:
        """A shard has at most `end` samples. The smallest report counts."""
        shards = self._passes.get(data_epoch)
        if shards is None or not 0 <= number < self.shards or end < 0:
            return
        shard = shards[number]
        if shard.end != UNKNOWN and end >= shard.end:
            return
        shard.end = end
        self._changed[data_epoch, _FIRST_SHARD - number] = None
        self._drop_what_is_behind()
        self._update_complete(data_epoch)
        if not any(s.end for s in shards):
            self.failed = (
                f"the stream has ended after {self.samples_done:,} samples, before job.stop, and "
                "gives nothing when it is read again; make it start over each time, or lower "
                "job.stop"
                if data_epoch
                else "the dataset is a stream, and has no samples; check the task's dataset()"
            )

    # ------------------------------------------------------------ figures

    def is_finished(self) -> bool:
        """Whether a limit of samples or steps is reached."""
        return self.samples_done >= self.samples_max or self.steps_done >= self.steps_max

    def passes(self) -> int:
        """How often the stream has been started."""
        return self._epoch + 1

    def samples_in_all(self) -> int | None:
        """Length of the stream; None until the first data epoch is complete."""
        return self._complete[0][0] if 0 in self._complete else None

    def samples_leased(self) -> int:
        """Samples of all portions that are leased or done; a lower bound."""
        return self._with_outstanding()[0]

    def epochs_done(self) -> float:
        """Data epochs, with a fraction of the newest one if an earlier epoch's length is known."""
        if not self._complete:
            return 0.0
        whole = sum(samples for samples, _ in self._complete.values())
        per_epoch = whole / len(self._complete)
        return len(self._complete) + min((self.samples_done - whole) / per_epoch, 1.0)

    def progress(self) -> float | None:
        """Progress of the run, 0..1; None without a limit."""
        if self.samples_max == self.steps_max == math.inf:
            return None
        done = (self.samples_done / self.samples_max, self.steps_done / self.steps_max)
        return min(1.0, max(done))

    # ------------------------------------------------------------ persisted state

    def to_json(self) -> Json:
        """What is done, for a checkpoint: data epochs, and in the others shards, in `order`."""
        complete = [[epoch, *counted] for epoch, counted in sorted(self._complete.items())]
        passes = [
            [epoch, [_saved(shards[n]) for n in self.order]]
            for epoch, shards in sorted(self._passes.items())
        ]
        return {"stream_shards": self.shards, "stream": [complete, passes]}

    def restore(self, data: list[Any], portion_samples: int) -> None:
        """Resume from a checkpoint: this is done, everything else is leased (again).

        portion_samples: at that time. If it has changed, samples done behind the first gap of a
        shard are done again. The last shards of `order` may be new since: the newest data epoch has
        them, too.
        """
        complete, passes = data
        standing: dict[Key, Any] = {(epoch, _COMPLETE): counted for epoch, *counted in complete}
        newest = max((epoch for epoch, *_ in (*complete, *passes)), default=0)
        for epoch, shards in passes:
            new = _EMPTY if epoch < newest else _NEW
            rows = [*shards, *[new] * (self.shards - len(shards))]
            for n, (base, done_to, end, done) in zip(self.order, rows, strict=True):
                row = [base, done_to, done_to, end]
                if portion_samples != self.portion_samples:
                    begin = base + done_to * portion_samples
                    row, done = [begin if end == UNKNOWN else min(begin, end), 0, 0, end], []
                standing[epoch, _FIRST_SHARD - n] = row
                standing |= dict.fromkeys(((epoch, i * self.shards + n) for i in done), DONE)
        self.go_on((newest, 0), standing)
        if self._epoch not in self._passes:
            self._begin_pass(self._epoch + 1)
        for epoch in sorted(self._passes.keys() - {self._epoch}):
            self._returned += self._undone(epoch)
        self._changed = dict.fromkeys(
            [*standing, *((epoch, _COMPLETE) for epoch in self._complete), *self._returned]
        )

    def take_changes(self) -> list[tuple[int, int, Any]]:
        """[(data epoch, portion, its slot or RETURNED or DONE)] since the last call, and (data
        epoch, a negative number, the state of a shard or epoch); None: forget the entry.
        """
        changed, self._changed = list(self._changed), {}
        return [(*key, self._standing(*key)) for key in changed]

    @property
    def next(self) -> tuple[int, int]:
        """(the newest data epoch, 0)."""
        return self._epoch, 0

    def go_on(self, next_: Key, standing: dict[Key, Any]) -> None:
        """Rebuild the state from all that `take_changes` returned; `standing`: what is not None."""
        self._epoch = next_[0]
        self._passes = {self._epoch: self._new_pass()}
        portions: dict[Key, int] = {}
        for (epoch, portion), known in standing.items():
            if portion == _COMPLETE:
                self._complete[epoch] = (known[0], known[1])
            elif portion < 0:
                shards = self._passes.setdefault(epoch, self._new_pass())
                shards[_FIRST_SHARD - portion] = _Shard(*known)
            else:
                portions[epoch, portion] = known
        for epoch in self._complete:
            self._passes.pop(epoch, None)
        stale = [key for key in portions if key[0] not in self._passes]
        for key in stale:
            del portions[key]
        for (epoch, portion), slot in portions.items():
            number, index = portion % self.shards, portion // self.shards
            if slot == DONE:
                self._passes[epoch][number].done.add(index)
            elif slot != RETURNED:
                self._reading[slot] = number
        self._count()
        self._resume(portions)
        self._changed = dict.fromkeys(stale)

    def _standing(self, epoch: int, portion: int) -> Any:
        if portion == _COMPLETE:
            return list(self._complete[epoch])
        if epoch not in self._passes:
            return None
        shards = self._passes[epoch]
        if portion < 0:
            shard = shards[_FIRST_SHARD - portion]
            return [shard.base, shard.next, shard.done_to, shard.end]
        if portion // self.shards in shards[portion % self.shards].done:
            return DONE
        owner = self._leased.get((epoch, portion))
        return RETURNED if owner is None and (epoch, portion) in self._returned else owner

    # ------------------------------------------------------------ passes and shards

    @property
    def _portion_steps(self) -> int:
        return self._steps(self.portion_samples)

    def _steps(self, samples: int) -> int:
        return -(-samples // self.step_samples)

    def _new_pass(self) -> list[_Shard]:
        return [_Shard() for _ in range(self.shards)]

    def _begin_pass(self, epoch: int) -> None:
        self._epoch = epoch
        self._passes[epoch] = self._new_pass()
        self._reading = {}

    def _count(self) -> None:
        """Count what is done, after the state was restored."""
        self.samples_done = sum(samples for samples, _ in self._complete.values())
        self.steps_done = sum(steps for _, steps in self._complete.values())
        for epoch, shards in list(self._passes.items()):
            for shard in shards:
                samples, steps = self._counted(shard)
                self.samples_done += samples
                self.steps_done += steps
            self._update_complete(epoch)

    def _undone(self, epoch: int) -> list[Key]:
        """The unfinished portions of a data epoch whose ends are known, in order."""
        found = []
        for number, shard in enumerate(self._passes[epoch]):
            portions = -(-(shard.end - shard.base) // self.portion_samples)
            shard.next = max(portions, shard.done_to)
            indices = (i for i in range(shard.done_to, portions) if i not in shard.done)
            found += [(epoch, index * self.shards + number) for index in indices]
        return sorted(found)

    def _bounds(self, epoch: int, portion: int) -> tuple[int, int]:
        start, stop = self.bounds(portion)
        base = self._passes[epoch][portion % self.shards].base
        return base + start, base + stop

    def _is_behind(self, epoch: int, portion: int) -> bool:
        """Whether it begins behind the end of its shard, or its data epoch is complete."""
        if epoch not in self._passes:
            return True
        end = self._passes[epoch][portion % self.shards].end
        return end != UNKNOWN and self._bounds(epoch, portion)[0] >= end

    def _drop_what_is_behind(self) -> None:
        for key in [key for key in self._returned if self._is_behind(*key)]:
            self._forget(key)
            self._changed[key] = None

    def _take_returned(self, slot: int) -> Key | None:
        """A returned portion, if possible of the shard that the slot reads."""
        if not self._returned:
            return None
        own = self._reading.get(slot)
        key = next((k for k in self._returned if k[1] % self.shards == own), self._returned[0])
        self._returned.remove(key)
        self._reading.setdefault(slot, key[1] % self.shards)
        return key

    def _advance(self, slot: int) -> Key | None:
        samples, steps = self._with_outstanding()
        while not self.failed and samples < self.samples_max and steps < self.steps_max:
            number = self._choose(slot)
            if number is None:
                # All ends are known. Portions of this data epoch may still be leased.
                self._begin_pass(self._epoch + 1)
                continue
            shard = self._passes[self._epoch][number]
            index, shard.next = shard.next, shard.next + 1
            self._changed[self._epoch, _FIRST_SHARD - number] = None
            if index >= shard.done_to and index not in shard.done:
                return self._epoch, index * self.shards + number
        return None

    def _choose(self, slot: int) -> int | None:
        """The shard to read next; None: all have ended."""
        shards = self._passes.get(self._epoch, [])
        own = self._reading.get(slot)
        if own is not None and own < len(shards) and self._has_more(shards[own]):
            return own
        readers = Counter(number for other, number in self._reading.items() if other != slot)
        having = [n for n in self.order if shards and self._has_more(shards[n])]
        if not having:
            return None
        self._reading[slot] = min(having, key=lambda n: (readers[n], shards[n].next))
        return self._reading[slot]

    def _has_more(self, shard: _Shard) -> bool:
        return shard.end == UNKNOWN or shard.base + shard.next * self.portion_samples < shard.end

    def _with_outstanding(self) -> tuple[int, int]:
        """Samples and steps that are done or outstanding, if no shard ends earlier."""
        keys = (*self._leased, *self._returned)
        count = sum(not self._is_behind(*key) for key in keys)
        samples = self.samples_done + count * self.portion_samples
        return samples, self.steps_done + count * self._portion_steps

    def _mark(self, epoch: int, number: int, index: int) -> None:
        shard = self._passes[epoch][number]
        shard.done.add(index)
        while shard.done_to in shard.done:
            shard.done.remove(shard.done_to)
            self._changed[epoch, shard.done_to * self.shards + number] = None
            shard.done_to += 1
        self._changed[epoch, _FIRST_SHARD - number] = None
        self._update_complete(epoch)

    def _update_complete(self, epoch: int) -> None:
        """Mark a data epoch as complete if all of its shards are."""
        shards = self._passes.get(epoch)
        if shards is None or not all(self._is_complete(shard) for shard in shards):
            return
        counted = [self._counted(shard) for shard in shards]
        if not any(samples for samples, _ in counted):
            return  # The run fails.
        del self._passes[epoch]
        self._complete[epoch] = (sum(n for n, _ in counted), sum(n for _, n in counted))
        self._changed |= dict.fromkeys((epoch, _FIRST_SHARD - n) for n in range(-1, self.shards))

    def _is_complete(self, shard: _Shard) -> bool:
        done_to = shard.base + shard.done_to * self.portion_samples
        return shard.end != UNKNOWN and done_to >= shard.end

    def _counted(self, shard: _Shard) -> tuple[int, int]:
        """Samples and steps of a shard that are done."""
        most = self.portion_samples * shard.done_to
        if shard.end != UNKNOWN:
            most = max(min(most, shard.end - shard.base), 0)
        full, rest = divmod(most, self.portion_samples)
        lengths = [shard.base, rest, *(self._length(shard, index) for index in shard.done)]
        samples = full * self.portion_samples + sum(lengths)
        return samples, full * self._portion_steps + sum(map(self._steps, lengths))

    def _length(self, shard: _Shard, index: int) -> int:
        """Samples of a portion; its full size while the end of the shard is unknown."""
        if shard.end == UNKNOWN:
            return self.portion_samples
        rest = shard.end - shard.base - index * self.portion_samples
        return max(0, min(rest, self.portion_samples))
