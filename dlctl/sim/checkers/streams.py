"""A stream: every sample is in exactly one of the completed portions."""

from __future__ import annotations

from collections import Counter

from dlctl.roles.protocol.effects import Compute
from dlctl.sim.checkers.base import Checker
from dlctl.sim.objectives import opened, shard_names, stream_rows
from dlctl.sim.process import Process
from dlctl.sim.world import World
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Peer

Rows = Counter[tuple[int, int]]
"""(data epoch, row) -> how often."""


class StreamChecker(Checker):
    """The completed portions of a finished run contain every row of its first `epochs` data epochs
    once; those of a stopped run contain none twice.
    """

    def __init__(
        self, lengths: tuple[int, ...], batch_size: int, epochs: int, names: tuple[str, ...] = ()
    ) -> None:
        """lengths: samples of each shard. names: of the shards; (): the usual ones."""
        self.lengths = lengths
        self.names = names or shard_names(len(lengths))
        self.batch_size = batch_size
        self.epochs = epochs
        self.computed: Rows = Counter()
        self.done: Rows = Counter()
        self._leases: dict[tuple[int, int], m.Lease] = {}
        self._reported: set[tuple[int, int]] = set()

    def on_effect(self, process: Process, effect: Effect) -> None:
        if isinstance(effect, Compute):
            slot = int(process.name.removeprefix("worker-"))
            for number in range(effect.number, effect.number + effect.count):
                self.computed += self._rows(effect, number, slot)

    def on_message(self, process: Process, peer: Peer, message: m.Message) -> None:
        if isinstance(message, m.Lease) and message.start < message.stop:
            self._leases[message.data_epoch, message.portion] = message
        if not isinstance(message, m.PortionDone):
            return
        key = (message.data_epoch, message.portion)
        if key not in self._reported:
            self._reported.add(key)
            lease = self._leases[key]
            for number in range((lease.stop - lease.start) // self.batch_size):
                self.done += self._rows(lease, number, message.slot)

    def _rows(self, of: Compute | m.Lease, number: int, slot: int) -> Rows:
        portion, batch = (of.start, of.stop), (number, self.batch_size)
        shard = opened(self.names, slot, of.shard)
        rows = stream_rows(self.lengths, shard, portion, batch)
        return Counter((of.data_epoch, int(row)) for row in rows)

    def everything(self) -> Rows:
        rows = range(sum(self.lengths))
        return Counter((epoch, row) for epoch in range(self.epochs) for row in rows)

    def at_end(self, world: World) -> None:
        if twice := [row for row, count in self.done.items() if count > 1]:
            raise self.broken(f"{len(twice)} samples are in two portions: {twice[:5]}")
        if world.store.run.get("state") == "finished" and self.done != self.everything():
            missing, more = self.everything() - self.done, self.done - self.everything()
            raise self.broken(f"{len(missing)} samples were left out, {len(more)} not asked for")
