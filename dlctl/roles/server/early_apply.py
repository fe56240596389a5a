"""Which push a shard works on while it comes: one at a time, and none twice."""

from __future__ import annotations

from collections.abc import Sequence

from dlctl.compress.plain import whole_values
from dlctl.messages import Push
from dlctl.shards.base import Shard


class EarlyApply:
    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._begun: dict[int, tuple[int, int]] = {}
        """Slot -> epoch and number of its newest push that was begun. What was given up, because
        another one was applied first, is not begun again: on a slow link that might happen any
        number of times."""
        self._holder = -1
        """The slot whose push was begun last."""
        self._waiting = -1
        """The slot that has found it at work since the last time that more of it came."""

    def comes(self, push: Push, come: Sequence[int]) -> None:
        """So many bytes of each array of a push are there that may be the next one."""
        values = whole_values(push.delta)
        if values is None or values.size != self.shard.size:
            return
        slot, which = push.slot, (push.epoch, push.seq)
        count = min(come[0] // values.itemsize, values.size)
        is_new = self._begun.get(slot) != which
        if is_new and self._waiting == slot:
            self.shard.forget_prepared()  # It has not come any further, or not as fast.
        if self.shard.prepare(values, count, is_new=is_new):
            self._begun[slot] = which
            self._holder, self._waiting = slot, -1
        elif is_new:
            self._waiting = slot

    def ends(self, slot: int) -> None:
        """What this worker has pushed so far, and is not in the shard, will not be."""
        if self._holder == slot:
            self.shard.forget_prepared()
            self._holder = -1

    def keep(self, slots: frozenset[int]) -> None:
        """Nothing comes of the others."""
        if self._holder not in slots:
            self.ends(self._holder)
