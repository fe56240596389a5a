"""Exactly once: which pushes of which worker a shard has taken.

Per slot the shard keeps the newest epoch that has joined and the next sequence number that it
expects.
It takes strictly that one: an older number was taken before (acknowledged again, not applied
again), a newer one means that something was lost on the way (nothing is applied, the worker sends
it again).
An older epoch is a process that has been replaced: fenced.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlctl.messages import DUPLICATE, FENCED, GAP, Push

NEW = "new"
UNKNOWN = "unknown"


@dataclass(slots=True)
class _Slot:
    epoch: int
    next_seq: int = 0


class Deliveries:
    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}

    def join(self, slot: int, epoch: int) -> bool:
        """A worker joins (again). True if this is a new epoch of the slot."""
        known = self._slots.get(slot)
        if known is None or epoch > known.epoch:
            self._slots[slot] = _Slot(epoch)
            return True
        return False

    def is_current(self, slot: int, epoch: int) -> bool:
        known = self._slots.get(slot)
        return known is not None and epoch == known.epoch

    def is_fenced(self, slot: int, epoch: int) -> bool:
        known = self._slots.get(slot)
        return known is not None and epoch < known.epoch

    def next_seq(self, slot: int) -> int:
        """The number that is expected next; 0 of a slot that nobody has joined with."""
        known = self._slots.get(slot)
        return known.next_seq if known is not None else 0

    def judge(self, push: Push) -> str:
        """NEW, DUPLICATE, GAP, FENCED, or UNKNOWN for an epoch that has not joined."""
        known = self._slots.get(push.slot)
        if known is None or push.epoch > known.epoch:
            return UNKNOWN
        if push.epoch < known.epoch:
            return FENCED
        if push.seq < known.next_seq:
            return DUPLICATE
        return NEW if push.seq == known.next_seq else GAP

    def take(self, push: Push) -> None:
        """The push that was judged NEW is being applied (or refused for good)."""
        known = self._slots[push.slot]
        assert (push.epoch, push.seq) == (known.epoch, known.next_seq)
        known.next_seq += 1

    def to_json(self) -> list[list[int]]:
        """[[slot, epoch, next_seq], ...], to be saved with the shard's state."""
        return [[slot, s.epoch, s.next_seq] for slot, s in sorted(self._slots.items())]

    def load(self, rows: list[list[int]]) -> None:
        self._slots = {slot: _Slot(epoch, next_seq) for slot, epoch, next_seq in rows}
