"""Exactly once, while the model is cut anew: whatever part a server has, each gradient is in each
account once (`objectives.Ledger`; every cut is between accounts, so that a server has whole ones).
"""

from __future__ import annotations

import numpy as np

from dlctl import registry
from dlctl.compress.plain import expand
from dlctl.roles.coordinator.records import CompleteCheckpoint
from dlctl.sim.checkers.base import Checker
from dlctl.sim.checkers.book import Book, DonePortion, PushKey
from dlctl.sim.process import Process
from dlctl.sim.world import World
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Send
from dlctl.wire.messages import Array


class GlobalBook(Book):
    """A book whose cells are positions in the model. A push that is sent again may have lost its
    values, if its worker has other bounds now.
    """

    def on_effect(self, process: Process, effect: Effect) -> None:
        if not (isinstance(effect, Send) and isinstance(effect.message, m.Push)):
            super().on_effect(process, effect)
        elif not effect.message.table:
            self._on_push_of(process, str(effect.peer), effect.message)

    def _on_push_of(self, worker: Process, peer: str, push: m.Push) -> None:
        shard = int(peer.rpartition("-")[2])
        key = PushKey(push.slot, push.term, shard, push.seq)
        if not push.delta.arrays[0].size:
            self.cells.setdefault(key, np.empty(0, np.int64))
            return
        delta = expand(registry.load("compressors", push.delta.kind), push.delta, push.delta.length)
        client = worker.machine.joining.tables[0][shard]  # type: ignore[attr-defined]
        cells = client.lo + np.flatnonzero(delta.values)
        if not np.array_equal(self.cells.setdefault(key, cells), cells):
            raise self.broken(f"{key} was changed when it was sent again")

    def absent(self, done: DonePortion, accounts: Array) -> list[int]:
        """Cells of a portion that are in no account, and were not dropped by the method."""
        gone = {int(cell) for key in self.dropped for cell in self.cells[key]}
        places = (int(at) for cell in done.cells for at in self.objective.places(cell))
        return [at for at in places if not accounts.flat[at] and at not in gone]


class RecutChecker(Checker):
    def __init__(self, book: GlobalBook) -> None:
        self.book = book
        self.cuts = 0
        """Cuts that were made."""
        self._first: dict[PushKey, float] = {}
        """The value of a push's first cell when it was acknowledged by a server that has it."""

    def on_effect(self, process: Process, effect: Effect) -> None:
        if isinstance(effect, CompleteCheckpoint):
            self._on_checkpoint(effect)
        if not isinstance(effect, Send):
            return
        match effect.message:
            case m.NewBounds(number=number):
                self.cuts = max(self.cuts, number)
            case m.Ack():
                self._on_ack(process, self.book.key(process, effect.peer, effect.message))

    def _on_checkpoint(self, effect: CompleteCheckpoint) -> None:
        """Its files are the model, and not parts of two cuts."""
        parts = [(part["lo"], part["hi"]) for part in effect.manifest["shards"]]
        ends = [0, *(hi for _, hi in parts)]
        if [lo for lo, _ in parts] != ends[:-1] or ends[-1] != effect.manifest["size"]:
            raise self.broken(f"checkpoint {effect.number} has the parts {parts}")

    def _on_ack(self, server: Process, key: PushKey | None) -> None:
        if key is None or key not in self.book.acknowledged or not len(self.book.cells[key]):
            return
        shard = server.machine.serving.parameters  # type: ignore[attr-defined]
        cells = self.book.cells[key]
        of_it = cells[(cells >= shard.lo) & (cells < shard.hi)] - shard.lo
        values = shard.shard.w[of_it]
        if not values.all():
            raise self.broken(f"{key} is acknowledged and not applied")
        if of_it.size and of_it[0] + shard.lo == cells[0]:
            self._first.setdefault(key, float(values[0]))

    def at_end(self, world: World) -> None:
        w = world.weights()
        lost = [key for key in sorted(self.book.acknowledged) if not w[self.book.cells[key]].all()]
        changed = [key for key, value in self._first.items() if w[self.book.cells[key][0]] != value]
        if lost or changed:
            raise self.broken(f"{len(lost)} pushes lost, {len(changed)} applied again: {lost[:3]}")
        accounts = self.book.objective.by_shard(w)
        for number, total in enumerate(accounts.sum(axis=1)):
            if abs(total - round(float(total))) > 1e-3:
                raise self.broken(f"the steps of account {number} add up to {total:.4f}")
        if world.store.run.get("state") != "finished":
            return
        for done in self.book.done:
            if done.process.status == 0 and (absent := self.book.absent(done, accounts)):
                raise self.broken(f"{done.message} is done, but in no account: {absent[:5]}")
