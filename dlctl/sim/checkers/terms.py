"""Terms of slots and shards: they grow, are persisted before they are issued, have one owner."""

from __future__ import annotations

from dlctl.roles.coordinator.records import IssueTerm
from dlctl.sim.checkers.base import Checker
from dlctl.sim.process import Process
from dlctl.sim.store import Store
from dlctl.sim.world import World
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Peer, Send
from dlctl.wire.messages import APPLIED, HELD


class TermsChecker(Checker):
    """Also: once a new term of a shard has served, no older one accepts a push."""

    def __init__(self) -> None:
        self._store = Store()
        """The run's store: while the disk is full, a dying coordinator loses issued terms."""
        self._issued: dict[tuple[Process, str], int] = {}
        """(coordinator, name) -> the newest that it has issued."""
        self._given: dict[str, int] = {}
        """The newest that a process has received: while the disk is full others may be lost, and
        issued again."""
        self._owners: dict[tuple[str, int], int] = {}
        """(name, term) -> the incarnation that received it."""
        self._serving: dict[int, int] = {}
        """Shard -> the newest term that has served it."""
        self._workers: dict[tuple[Process, Peer], tuple[int, int]] = {}
        """(server, connection) -> (slot, term) of its worker, even if that is gone."""
        self._joined: dict[tuple[int, int], int] = {}
        """(shard, slot) -> the newest term that the shard has admitted."""

    def at_start(self, world: World) -> None:
        self._store = world.store

    def on_effect(self, process: Process, effect: Effect) -> None:
        if isinstance(effect, IssueTerm):
            if effect.term <= self._given.get(effect.name, 0):
                raise self.broken(f"{effect} is not new")
            self._issued[process, effect.name] = effect.term
        if not isinstance(effect, Send):
            return
        match effect.message:
            case m.Welcome():
                self._on_welcome(process, effect.peer, effect.message)
            case m.Joined():
                self._on_joined(process, effect.peer, effect.message)
            case m.Ack(outcome=outcome) if outcome in (APPLIED, HELD):
                self._on_taken(process, effect.peer, effect.message)

    def on_message(self, process: Process, peer: Peer, message: m.Message) -> None:
        if isinstance(message, m.Join | m.Push):
            self._workers[process, peer] = (message.slot, message.term)
        elif isinstance(message, m.Welcome) and message.term:
            self._on_welcomed(process, message)

    def _on_joined(self, server: Process, peer: Peer, joined: m.Joined) -> None:
        shard = joined.shard
        self._serving[shard] = max(joined.term, self._serving.get(shard, 0))
        slot, term = self._workers.get((server, peer), (0, 0))
        self._joined[shard, slot] = max(term, self._joined.get((shard, slot), 0))

    def _on_taken(self, server: Process, peer: Peer, ack: m.Ack) -> None:
        if ack.term < self._serving.get(ack.shard, 0):
            raise self.broken(f"{server} of term {ack.term} still takes pushes")
        slot, term = self._workers.get((server, peer), (0, 0))
        if 0 < term < self._joined.get((ack.shard, slot), 0):
            raise self.broken(f"{server} takes a push of worker-{slot}'s old term {term}")

    def _on_welcome(self, process: Process, peer: Peer, welcome: m.Welcome) -> None:
        assert isinstance(peer, bytes)
        client = process.network.client(peer)
        if welcome.name.startswith(("agent", "guest")) or not isinstance(client, Process):
            return
        name, on_record = welcome.name, self._store.terms.get(welcome.name)
        if welcome.term != self._issued.get((process, name), on_record):
            raise self.broken(f"term {welcome.term} of {name} is not on record")

    def _on_welcomed(self, process: Process, welcome: m.Welcome) -> None:
        name, term = welcome.name, welcome.term
        self._given[name] = max(term, self._given.get(name, 0))
        owner = self._owners.setdefault((name, term), process.incarnation)
        if owner != process.incarnation:
            raise self.broken(f"term {term} of {name} is given to two processes")
