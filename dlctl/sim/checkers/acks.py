"""No ack before apply: an acknowledged push would also survive the server."""

from __future__ import annotations

from typing import Any

from dlctl.sim.checkers.base import Checker
from dlctl.sim.checkers.book import Book, DonePortion, PushKey
from dlctl.sim.process import Process
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Send
from dlctl.wire.messages import APPLIED, DUPLICATE, Array


def durable(server: Process) -> Array:
    """float32[n]: the shard as a server that takes this one's place would find it; as it stands in
    memory, if it is kept nowhere else.
    """
    machine: Any = server.machine
    found = machine.storages.survivor(machine.serving.shard.optimizer)
    weights: Array = machine.serving.shard.w if found is None else found.w
    return weights


class AcksChecker(Checker):
    """An ack follows the commit; a portion is done when its gradients are in flight."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self._found: set[PushKey] = set()
        """Pushes that were durable when they were acknowledged first."""

    def on_effect(self, process: Process, effect: Effect) -> None:
        if not isinstance(effect, Send):
            return
        match effect.message:
            case m.Ack(outcome=outcome, table=0) if outcome in (APPLIED, DUPLICATE):
                key = self.book.key(process, effect.peer, effect.message)
                if key is not None:
                    self._on_ack(process, key)
            case m.PortionDone():
                # Pushes of the residual in this same event are sent after this.
                done = self.book.done[-1]
                process.timeline.after(0.0, lambda: self._on_done(done))

    def _on_ack(self, server: Process, key: PushKey) -> None:
        if key in self._found or key in self.book.dropped:
            return
        # Opening the surviving state takes longer than all other checks: done for every other push.
        weights = durable(server) if key.seq % 2 else server.machine.serving.shard.w  # type: ignore[attr-defined]
        if not weights[self.book.cells[key]].all():
            raise self.broken(f"{key} is acknowledged and not applied")
        self._found.add(key)

    def _on_done(self, done: DonePortion) -> None:
        for shard, server in self.book.servers.items():
            weights = server.machine.serving.shard.w  # type: ignore[attr-defined]
            if missing := self.book.missing(done, shard, weights):
                raise self.broken(f"{done.message} is not in {server.name}: gradients {missing}")
