"""The data: every sample is computed, and no two living workers hold the same portion."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from dlctl.roles.coordinator.records import AddEvent
from dlctl.roles.protocol.effects import Compute
from dlctl.roles.protocol.loop_effects import PortionPart
from dlctl.sim.checkers.base import Checker
from dlctl.sim.checkers.stopped import StoppedBatches
from dlctl.sim.loops import Trained
from dlctl.sim.objectives import batch_rows
from dlctl.sim.process import Process
from dlctl.sim.world import World
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Peer, Send
from dlctl.wire.messages import Array


class SamplesChecker(Checker):
    """Checks that in a finished run every sample of the first `epochs` data epochs is computed, and
    just once if `once`.
    """

    def __init__(self, samples: int, epochs: int, *, once: bool) -> None:
        self.samples = samples
        self.epochs = epochs
        self.once = once
        self._asked: list[Compute] = []
        self._stopped = StoppedBatches()
        self._trained: list[PortionPart] = []
        """Delivered to training loops of the user's own, and not skipped."""

    def on_effect(self, process: Process, effect: Effect) -> None:
        is_again = self._stopped.is_again(process, effect)
        if isinstance(effect, Compute) and not is_again:
            self._asked.append(effect)
        if isinstance(effect, Trained):
            self._trained += effect.pieces

    def offered(self, world: World) -> dict[int, Array]:
        """Data epoch -> int64[samples], how often each was computed."""
        job = world.job
        counts = {e.data_epoch: np.zeros(self.samples, np.int64) for e in self._asked}
        for e in self._asked:
            for number in range(e.number, e.number + e.count):
                portion, batch = (e.start, e.stop), (number, e.step_samples)
                rows = batch_rows(self.samples, job.job.seed, e.data_epoch, portion, batch)
                counts[e.data_epoch][rows] += 1
        for piece in self._trained:
            of_epoch = counts.setdefault(piece.data_epoch, np.zeros(self.samples, np.int64))
            portion, whole = (piece.start, piece.stop), (0, self.samples)
            of_epoch[batch_rows(self.samples, job.job.seed, piece.data_epoch, portion, whole)] += 1
        return counts

    def at_end(self, world: World) -> None:
        if world.store.run.get("state") != "finished":
            return
        counts = self.offered(world)
        for data_epoch in range(self.epochs):
            seen = counts.get(data_epoch, np.zeros(self.samples, np.int64))
            if seen.min() < 1:
                raise self.broken(f"epoch {data_epoch} leaves {int((seen < 1).sum())} samples out")
            if self.once and seen.max() > 1:
                raise self.broken(f"epoch {data_epoch} has {int((seen > 1).sum())} samples twice")
        if not set(counts) <= set(range(self.epochs)):
            raise self.broken(f"{self.epochs} epochs were asked for, these done: {sorted(counts)}")


class LeasesChecker(Checker):
    """A portion has one living holder until it is recorded as done, and none after that (a worker
    that is given up does not count, it is fenced, nor one that was taken for gone); the recorded
    portions cover the data epochs of a finished run. If the coordinator `forgets`, because it dies
    while the disk is full, only the latter is checked: the next one may lease unrecorded portions
    again. copies: the number of
    additional holders that may have backup copies.
    """

    def __init__(
        self, samples: int, epochs: int = 0, *, forgets: bool = False, copies: int = 0
    ) -> None:
        self.samples = samples
        self.epochs = epochs
        """0: the method has no epochs."""
        self.forgets = forgets
        self.copies = copies
        self._holders: defaultdict[tuple[int, int], list[Process]] = defaultdict(list)
        self._ranges: dict[tuple[int, int], tuple[int, int]] = {}
        self._noted: set[tuple[int, int]] = set()
        self._reported: set[tuple[int, int]] = set()
        """Portions reported done to a coordinator; its answer may be lost."""
        self._answered: set[tuple[Process, int]] = set()
        """(worker, number of its request)."""
        self._left: set[tuple[str, int]] = set()
        """Names and incarnations of those that are on record as gone without an agent's word."""
        self._unreceived: set[m.Lease] = set()
        """Answers over connections that were broken."""

    def on_effect(self, process: Process, effect: Effect) -> None:
        if isinstance(effect, AddEvent) and effect.kind == "leave":
            self._left.add((effect.daemon, effect.data["incarnation"]))
        if not isinstance(effect, Send):
            return
        match effect.message:
            case m.Lease(start=start, stop=stop) if start < stop:
                self._on_lease(process, effect.peer, effect.message)
            case m.PortionNoted(data_epoch, portion):
                self._holders.pop((data_epoch, portion), None)
                self._noted.add((data_epoch, portion))

    def on_message(self, process: Process, peer: Peer, message: m.Message) -> None:
        if isinstance(message, m.PortionDone):
            self._reported.add((message.data_epoch, message.portion))

    def _has_it(self, holder: Process) -> bool:
        is_gone = (holder.name, holder.incarnation) in self._left
        return holder.alive and not holder.given_up and not is_gone

    def _on_lease(self, coordinator: Process, peer: Peer, lease: m.Lease) -> None:
        key = (lease.data_epoch, lease.portion)
        self._ranges[key] = (lease.start, lease.stop)
        assert isinstance(peer, bytes)
        client = coordinator.network.client(peer)
        if not isinstance(client, Process):
            self._unreceived.add(replace(lease, samples=0))  # As the next coordinator has it.
            return
        if (client, lease.request) in self._answered:
            return  # The same answer again, to a question that came again.
        self._answered.add((client, lease.request))
        if (known := replace(lease, samples=0)) in self._unreceived:
            self._unreceived.remove(known)  # As well. Somebody else may have done it since.
            if self.copies:
                return
        if self.forgets:
            return
        if key in self._noted:
            raise self.broken(f"portion {key} is done, and leased to {client}")
        holders = [each for each in self._holders[key] if each is not client and self._has_it(each)]
        if len(holders) > self.copies:
            raise self.broken(f"portion {key} is leased to {client}, and {holders[0]} has it")
        self._holders[key] = [*holders, client]

    def at_end(self, world: World) -> None:
        if world.store.run.get("state") != "finished":
            return
        for data_epoch in range(self.epochs):
            covered = np.zeros(self.samples, np.int64)
            for key in self._noted | self._reported:
                if key[0] == data_epoch:
                    covered[slice(*self._ranges[key])] += 1
            if (covered != 1).any():
                raise self.broken(f"the portions done of epoch {data_epoch} do not cover its data")
