"""The data of a run whose dataset is a stream: shards of unknown length, each in its own order.

A portion is a range of one shard, determined by its number (`stream_passes.py`). A worker keeps
reading its shard, so that it need not skip; a worker without a shard, or whose shard has ended,
takes the shard with the fewest other readers, the first of them in the order of the run. The worker
that reaches the end of a shard reports it: nothing behind the end is leased any more, and leased
portions behind it are empty.

If all shards end before the run, they are read again: that is the next data epoch. So every sample
is leased at least once per data epoch, and exactly once if nothing fails, provided that the stream
yields the same samples in the same order whenever it is opened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dlctl.errors import RemoteProtocolError
from dlctl.roles.coordinator.pools.data_pool import DONE, RETURNED, UNKNOWN, DataPool, Range
from dlctl.roles.coordinator.pools.holders import Key
from dlctl.roles.coordinator.pools.stream_epochs import StreamEpochs
from dlctl.roles.coordinator.pools.stream_passes import PortionLimits, PortionSizes, Readers
from dlctl.wire.messages import Json


class StreamPool(DataPool):
    def __init__(
        self, shards: int, portion_samples: int, step_samples: int,
        samples_max: float = math.inf, steps_max: float = math.inf, order: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """order: the shards in the order in which they are begun; (): by their numbers."""
        super().__init__(portion_samples)
        self.cut = PortionSizes(shards, portion_samples, step_samples)
        self.limits = PortionLimits(samples_max, steps_max)
        self.order = order or range(shards)
        self.epochs = StreamEpochs(self.cut, self.changed)
        self._readers = Readers(self.order)
        """Which slot reads which shard in the newest data epoch."""
        self._has_reported_end = False

    # ------------------------------------------------------------ leases

    def take(self, slot: int, now: float) -> Range | None:
        key = self._choose_returned(slot) or self._advance(slot)
        if key is None:
            return None
        self.holders.lease(key, slot)
        self.epochs.expect([key])
        epoch, portion = key
        return Range(*key, *self.epochs.open[epoch].bounds(portion), portion % self.cut.shards)

    def may_prefetch(self, slot: int, slots: int) -> bool:
        left = self.limits.left(*self.epochs.with_outstanding(), self.cut)
        return self.holders.count(slot) * slots <= left

    def bounds(self, portion: int) -> tuple[int, int]:
        """A portion's samples [start, stop) in its shard, if all portions had this size."""
        index = portion // self.cut.shards
        return index * self.portion_samples, (index + 1) * self.portion_samples

    def give_back(self, slot: int, *, lives: bool = False) -> list[Key]:
        self._readers.leave(slot)
        back = super().give_back(slot)
        self._drop_what_is_behind()
        if lives:
            self.holders.mark_uncertain(back)
        return back

    def finish(self, data_epoch: int, portion: int, now: float, end: int = UNKNOWN) -> bool:
        if end != UNKNOWN:
            self.ended(data_epoch, portion % self.cut.shards, end)
        self.changed[data_epoch, portion] = None
        self.holders.forget((data_epoch, portion))
        shards = self.epochs.open.get(data_epoch)
        if shards is None:
            return False
        shards.forget(portion)
        if not shards.may_be_done(portion):
            return False
        if not shards.is_behind(portion):
            self.epochs.mark(data_epoch, portion)
        return True

    def _choose_returned(self, slot: int) -> Key | None:
        """A returned portion, if possible of the shard that the slot reads."""
        returned, own = self.holders.returned, self._readers.of(slot)
        mine = (key for key in returned if key[1] % self.cut.shards == own)
        key = next(mine, None) or self.holders.first_returned()
        if key is not None and own is None:
            self._readers.read(slot, key[1] % self.cut.shards)
        return key

    def _advance(self, slot: int) -> Key | None:
        if self.limits.are_reached(*self.epochs.with_outstanding()):
            return None
        while not self.failed:
            shards = self.epochs.open.get(self.epochs.newest)
            number = self._readers.choose(slot, shards) if shards is not None else None
            if number is None:
                # All ends are known. Portions of this data epoch may still be leased.
                self._begin_next()
            elif key := self.epochs.advance(number):
                return key
        return None

    def _begin_next(self) -> None:
        self.epochs.begin_next()
        self._readers = Readers(self.order)

    # ------------------------------------------------------------ ends of shards

    def on_end(self, slot: int, data_epoch: int, number: int, end: int) -> None:
        """Record a reported end of a shard, if it lies in a portion that the worker has leased."""
        shards = self.epochs.open.get(data_epoch)
        if shards is None or not 0 <= number < self.cut.shards:
            return
        index = (end - shards.shards[number].base) // self.portion_samples
        # At the boundary of two portions the shard may end in either.
        for portion in ((i * self.cut.shards + number) for i in (index, index - 1)):
            may_finish = self.may_finish(slot, data_epoch, portion)
            if may_finish and self.epochs.may_end_in(data_epoch, portion, end):
                self.ended(data_epoch, number, end)

    def check_end(self, data_epoch: int, portion: int, end: int) -> None:
        if not self.epochs.may_end_in(data_epoch, portion, end):
            raise RemoteProtocolError(f"sample {end} is not in portion {portion}")

    def ended(self, data_epoch: int, number: int, end: int) -> None:
        """A shard has at most `end` samples. The smallest report counts."""
        shards = self.epochs.open.get(data_epoch)
        if shards is None or not 0 <= number < self.cut.shards or end < 0:
            return
        if not self.epochs.end_at(data_epoch, number, end):
            return
        self._drop_what_is_behind()
        self.epochs.close(data_epoch)
        if shards.is_empty():
            self.failed = (
                f"the stream has ended after {self.samples_done:,} samples, before job.stop, and "
                "gives nothing when it is read again; make it start over each time, or lower "
                "job.stop"
                if data_epoch
                else "the dataset is a stream, and has no samples; check the task's dataset()"
            )

    def _drop_what_is_behind(self) -> None:
        for key in [key for key in self.holders.returned if self.epochs.is_behind(key)]:
            self.holders.forget(key)
            self.changed[key] = None

    def news(self) -> str:
        """A log line, once, that the stream has ended before the run; "": nothing is new."""
        samples = self.samples_in_all()
        if self._has_reported_end or self.passes() == 1 or samples is None:
            return ""
        self._has_reported_end = True
        text = f"the stream has ended after {samples:,} samples, and is read again"
        return f"{text} until job.stop is reached"

    # ------------------------------------------------------------ figures

    @property
    def samples_done(self) -> int:
        return self.epochs.samples_done

    def is_finished(self) -> bool:
        """Whether a limit of samples or steps is reached."""
        return self.limits.are_reached(self.samples_done, self.epochs.steps_done)

    def passes(self) -> int:
        """How often the stream has been started."""
        return self.epochs.newest + 1

    def samples_in_all(self) -> int | None:
        """Length of the stream; None until the first data epoch is complete."""
        return self.epochs.complete[0][0] if 0 in self.epochs.complete else None

    def samples_leased(self) -> int:
        """The samples that are leased or done."""
        return self.epochs.with_outstanding()[0]

    def epochs_done(self) -> float:
        return self.epochs.epochs_done()

    def amount_done(self) -> str:
        return f"{self.samples_done:,} samples"

    def progress(self) -> float | None:
        return self.limits.progress(self.samples_done, self.epochs.steps_done)

    # ------------------------------------------------------------ persisted state

    def to_json(self) -> Json:
        return {
            "portion_samples": self.portion_samples, "stream_shards": self.cut.shards,
            "stream": self.epochs.to_json(self.order),
        }  # fmt: skip

    def restore(self, saved: Json) -> None:
        standing = self.epochs.saved(saved["stream"], saved["portion_samples"], self.order)
        self.resume((max((epoch for epoch, _ in standing), default=0), 0), standing)
        if self.epochs.newest not in self.epochs.open:
            self._begin_next()
        rest = self.epochs.lease_rest()
        self.holders.put_back(rest)
        self.epochs.expect(rest)
        self._has_reported_end = self.passes() > 1
        self.changed |= dict.fromkeys([*standing, *self.epochs.completed(), *rest])

    @property
    def next(self) -> Key:
        """(the newest data epoch, 0)."""
        return self.epochs.newest, 0

    def resume(self, next_: Key, standing: dict[Key, Any]) -> None:
        self.epochs = StreamEpochs(self.cut, self.changed)
        self._readers = Readers(self.order)
        portions = self.epochs.recall(next_[0], standing)
        for (_, portion), slot in portions.items():
            if slot >= 0:
                self._readers.read(slot, portion % self.cut.shards)
        self.recall_holders(portions)
        self.epochs.expect([*self.holders.leased, *self.holders.returned])
        self._has_reported_end = self.passes() > 1

    def standing_of(self, data_epoch: int, portion: int) -> Any:
        """The persisted state of a portion; negative numbers: a shard, or a complete data epoch."""
        if portion < 0 or data_epoch not in self.epochs.open:
            return self.epochs.standing_of(data_epoch, portion)
        if self.epochs.open[data_epoch].is_done_ahead(portion):
            return DONE
        key = data_epoch, portion
        return RETURNED if key in self.holders.returned else self.holders.leased.get(key)
