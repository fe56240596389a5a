"""What must be true of every run, whatever goes wrong in it. A checker looks on and raises."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from dlctl import messages as m
from dlctl import registry
from dlctl.machine import Effect, Peer, Send
from dlctl.messages import APPLIED, DUPLICATE, Array, Message
from dlctl.roles.effects import Compute
from dlctl.roles.journal import IssueTerm
from dlctl.sim.problems import Ledger, batch_rows
from dlctl.sim.process import Process
from dlctl.sim.world import World


class Checker:
    """Sees every effect before it is performed and every message before it is handled."""

    def on_effect(self, process: Process, effect: Effect) -> None:
        pass

    def on_message(self, process: Process, peer: Peer, message: Message) -> None:
        pass

    def at_end(self, world: World) -> None:
        pass


class LedgerChecker(Checker):
    """Exactly once: nothing acknowledged is lost, nothing is applied twice, no ack comes before its
    push is applied, and a push is never changed. If pushes are dense, a portion that is called done
    is in all servers; if they are not, part of it may wait in the worker's residual.
    """

    def __init__(self, problem: Ledger) -> None:
        self.problem = problem
        self.acknowledged: set[tuple[int, int, int, int]] = set()
        """(slot, epoch, shard, seq)."""
        self.lost = self.twice = 0
        self._cells: dict[tuple[int, int, int, int], Array] = {}
        self._who: dict[Process, tuple[int, int]] = {}
        self._servers: dict[int, Process] = {}
        self._numbers: defaultdict[tuple[int, int, int, int], list[int]] = defaultdict(list)
        """(slot, epoch, data epoch, start) -> numbers of the gradients of this portion."""
        self._computed: defaultdict[Process, int] = defaultdict(int)
        self._starts: dict[tuple[int, int], int] = {}
        """(data epoch, portion) -> where it starts."""
        self._dense = True

    def on_effect(self, process: Process, effect: Effect) -> None:
        if isinstance(effect, Compute):
            key = (*self._who[process], effect.data_epoch, effect.start)
            self._numbers[key].append(self._computed[process])
            self._computed[process] += 1
        if not isinstance(effect, Send):
            return
        match effect.message:
            case m.Join(_, slot, epoch, _):
                self._who[process] = (slot, epoch)
            case m.Push():
                self._on_push(str(effect.peer), effect.message)
            case m.Joined(shard):
                self._servers[shard] = process
            case m.Ack(outcome=outcome) if outcome in (APPLIED, DUPLICATE):
                self._on_ack(process, effect.peer, effect.message)
            case m.Lease():
                lease = effect.message
                self._starts[lease.data_epoch, lease.portion] = lease.start
            case m.PortionDone() if self._dense:
                self._on_portion(effect.message)

    def _on_push(self, peer: str, push: m.Push) -> None:
        key = (push.slot, push.epoch, int(peer.rpartition("-")[2]), push.seq)
        expand = registry.load("compressors", push.delta.kind).expand
        delta = expand(push.delta, push.delta.length)
        used = np.flatnonzero(delta.values)
        cells = used if delta.indices is None else delta.indices[used]
        self._dense = delta.indices is None
        known = self._cells.setdefault(key, cells)
        assert np.array_equal(known, cells), f"push {key} was changed when it was sent again"

    def _on_ack(self, server: Process, peer: Peer, ack: m.Ack) -> None:
        assert isinstance(peer, bytes)
        client = server.network.client(peer)
        who = self._who.get(client) if isinstance(client, Process) else None
        if who is None:
            return
        key = (*who, ack.shard, ack.seq)
        w = server.machine.serving.shard.w  # type: ignore[attr-defined]
        assert (w[self._cells[key]] == 1).all(), f"push {key} was acknowledged and not applied"
        self.acknowledged.add(key)

    def _on_portion(self, done: m.PortionDone) -> None:
        start = self._starts[done.data_epoch, done.portion]
        numbers = self._numbers[done.slot, done.epoch, done.data_epoch, start]
        cells = [self.problem.authors[done.slot, done.epoch, number] for number in numbers]
        for process in self._servers.values():
            w = process.machine.serving.shard.w  # type: ignore[attr-defined]
            assert (w[cells] == 1).all(), f"{done} is not in {process.name}"

    def at_end(self, world: World) -> None:
        counts = self.problem.counts(world.weights())
        self.twice = int((counts > 1).sum())
        self.lost = sum(
            int((counts[shard][self._cells[slot, epoch, shard, seq]] == 0).sum())
            for slot, epoch, shard, seq in sorted(self.acknowledged)
        )
        assert (self.lost, self.twice) == (0, 0), f"{self.lost} lost, {self.twice} twice"


class SamplesChecker(Checker):
    """In a finished run every sample of the first `epochs` data epochs is computed, and just once
    if `once`.
    """

    def __init__(self, samples: int, epochs: int, *, once: bool) -> None:
        self.samples = samples
        self.epochs = epochs
        self.once = once
        self._asked: list[Compute] = []

    def on_effect(self, process: Process, effect: Effect) -> None:
        if isinstance(effect, Compute):
            self._asked.append(effect)

    def offered(self, world: World) -> dict[int, Array]:
        """Data epoch -> int64[samples], how often each was computed."""
        job = world.job
        counts = {e.data_epoch: np.zeros(self.samples, np.int64) for e in self._asked}
        for e in self._asked:
            portion, batch = (e.start, e.stop), (e.number, job.workers.batch_size)
            rows = batch_rows(self.samples, job.job.seed, e.data_epoch, portion, batch)
            counts[e.data_epoch][rows] += 1
        return counts

    def at_end(self, world: World) -> None:
        if world.store.run.get("state") != "finished":
            return
        counts = self.offered(world)
        for data_epoch in range(self.epochs):
            assert counts[data_epoch].min() >= 1, f"epoch {data_epoch} has samples left out"
            assert not self.once or counts[data_epoch].max() == 1, f"epoch {data_epoch}: twice"
        assert set(counts) <= set(range(self.epochs)), "more epochs than the job asks for"


class TermsChecker(Checker):
    """Epochs and generations grow, are on record before they are handed out, and have one owner."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._owners: dict[tuple[str, int], int] = {}
        """(name, term) -> the incarnation that was given it."""

    def on_effect(self, process: Process, effect: Effect) -> None:
        if isinstance(effect, IssueTerm):
            assert effect.term > self._newest.get(effect.name, 0), f"{effect} is not new"
            self._newest[effect.name] = effect.term
        if isinstance(effect, Send) and isinstance(effect.message, m.Welcome):
            welcome = effect.message
            assert isinstance(effect.peer, bytes)
            client = process.network.client(effect.peer)
            if not welcome.name.startswith("agent") and isinstance(client, Process):
                assert welcome.term == self._newest[welcome.name], "a term that is not on record"
                owner = self._owners.setdefault((welcome.name, welcome.term), client.incarnation)
                assert owner == client.incarnation, f"{welcome.name}: one term, two processes"


class NothingLeft(Checker):
    """When a run has ended, none of its processes lives on."""

    def at_end(self, world: World) -> None:
        assert not world.living(), f"left behind: {', '.join(world.living())}"
