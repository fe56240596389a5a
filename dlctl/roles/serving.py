"""A shard at work: workers join, push and fetch; the rules by which anything gets into it.

A push passes, in this order: which epoch (fencing), which number (exactly once), what (sizes and
indices within the shard, every value finite), and only then the method's server side, which applies
it, holds it in a barrier or drops it. The ack goes out after that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlctl import messages as m
from dlctl.algorithms.base import Outcome, ServerSide, Shard
from dlctl.compress.base import Compressor, Delta
from dlctl.errors import RemoteProtocolError
from dlctl.flat import AVERAGED, CONSTANT, Layout
from dlctl.machine import Peer
from dlctl.messages import APPLIED, DUPLICATE, FENCED, GAP, GENERATION, HELD, LATE, REFUSED, Ack
from dlctl.roles.buffers import AveragedBuffers
from dlctl.roles.deliveries import NEW, UNKNOWN, Deliveries
from dlctl.roles.desk import Desk
from dlctl.roles.meters import Rates, Staleness
from dlctl.roles.token import is_genuine
from dlctl.vector import is_finite

_COUNTED = {
    DUPLICATE: "duplicates", GAP: "gaps", FENCED: "fenced", LATE: "late", REFUSED: "refused",
}  # fmt: skip


class Serving:
    def __init__(
        self,
        desk: Desk,
        run_id: str,
        key: bytes,
        index: int,
        generation: int,
        assigned: m.Assign,
        shard: Shard,
        side: ServerSide,
        compressor: tuple[str, type[Compressor]],
    ) -> None:
        self.desk = desk
        self.run_id = run_id
        self.key = key
        self.index = index
        self.generation = generation
        self.assigned = assigned
        self.shard = shard
        self.side = side
        self.compressor_name, self.compressor = compressor
        self.initialised = False
        self.deliveries = Deliveries()
        self.buffers: AveragedBuffers | None = None
        self.constant = np.zeros(0, np.float32)
        self.rates = Rates("pushes", "push_bytes", "fetch_bytes", *_COUNTED.values())
        self.staleness = Staleness()
        self._members: frozenset[int] = frozenset()
        self._peers: dict[int, Peer] = {}
        """Slot -> the connection of its newest epoch, for acks that come later than their push."""
        self._held: set[tuple[int, int, int]] = set()
        self._held_fetches: dict[int, tuple[Peer, m.Fetch]] = {}

    def metrics(self, now: float) -> dict[str, Any]:
        return {
            "version": self.shard.version,
            **self.rates.report(now),
            **self.staleness.report(),
        }

    def keep_extras(self, averaged: m.Array, constant: m.Array) -> None:
        """Shard 0 also holds what is not trained: averaged buffers and constant parameters."""
        layout = Layout.from_bytes(self.assigned.layout)
        self.buffers = AveragedBuffers(layout, np.array(averaged, np.float64))
        self.constant = np.array(constant, np.float32)

    # ------------------------------------------------------------ workers join

    def on_join(self, peer: Peer, message: m.Join) -> None:
        if message.run_id != self.run_id:
            self.desk.send(peer, m.Dismiss(f"this server belongs to run {self.run_id}"))
            return
        if not is_genuine(self.key, message.run_id, message.slot, message.epoch, message.token):
            self.desk.note(
                "warning", f"worker-{message.slot}: the token of its epoch is not genuine"
            )
            return
        if self.deliveries.is_fenced(message.slot, message.epoch):
            self.desk.send(peer, m.Dismiss(f"worker-{message.slot} has been replaced"))
            return
        if self.deliveries.join(message.slot, message.epoch):
            self._forget(message.slot)
            self._peers[message.slot] = peer
            self._settle(self.side.joined(message.slot))
        self._peers[message.slot] = peer
        self._answer_join(peer, message.slot)

    def _forget(self, slot: int) -> None:
        """What an old epoch of this slot was still waiting for."""
        self._held_fetches.pop(slot, None)
        self._held = {held for held in self._held if held[0] != slot}

    def _answer_join(self, peer: Peer, slot: int) -> None:
        self.desk.send(
            peer,
            m.Joined(
                self.index, self.generation, self.shard.version, self.assigned.lo,
                self.assigned.hi, self.initialised, self.deliveries.next_seq(slot),
            ),
        )  # fmt: skip

    def on_initialise(self, peer: Peer, message: m.Initialise) -> None:
        if not self.deliveries.is_current(message.slot, message.epoch):
            return
        if not self.initialised:
            if not self._fits(message):
                self.desk.note("error", "the model's initial values do not fit or are not finite")
                return
            self.shard.w[:] = message.values
            if self.index == 0:
                self.keep_extras(message.averaged, message.constant)
            self.initialised = True
        self._answer_join(peer, message.slot)

    def _fits(self, message: m.Initialise) -> bool:
        layout = Layout.from_bytes(self.assigned.layout)
        extras = (message.averaged.size, message.constant.size)
        sizes = (layout.size(AVERAGED), layout.size(CONSTANT)) if self.index == 0 else (0, 0)
        is_whole = message.values.size == self.shard.w.size and extras == sizes
        return is_whole and bool(np.isfinite(message.values).all())

    def _knows(self, slot: int, epoch: int) -> bool:
        return self.initialised and self.deliveries.is_current(slot, epoch)

    # ------------------------------------------------------------ pushes

    def on_push(self, peer: Peer, push: m.Push) -> None:
        self.rates.add("push_bytes", push.delta.nbytes)
        verdict = self.deliveries.judge(push)
        is_ours = push.generation == self.generation and self.initialised
        if verdict == UNKNOWN or not is_ours:
            self._ack(peer, push.seq, GENERATION, slot=push.slot)
        elif verdict != NEW:
            self._count(verdict)
            if not (verdict == DUPLICATE and self._is_held(push)):
                self._ack(peer, push.seq, verdict, slot=push.slot)
        else:
            self._peers[push.slot] = peer
            self._take(peer, push)

    def _take(self, peer: Peer, push: m.Push) -> None:
        try:
            delta = self._expand(push.delta)
        except RemoteProtocolError as error:
            self.deliveries.take(push)
            self._count(REFUSED)
            self.desk.note("warning", f"refused a push of worker-{push.slot}: {error}")
            self._ack(peer, push.seq, REFUSED, reason=str(error), slot=push.slot)
            return
        self.deliveries.take(push)
        self.rates.add("pushes", 1)
        self._settle(self.side.push(push, delta))

    def _expand(self, packed: m.Packed) -> Delta:
        """The delta of a push. Raises RemoteProtocolError for anything that must not get in."""
        if packed.kind != self.compressor_name:
            raise RemoteProtocolError(f'compressed with "{packed.kind:.20}", not as the job says')
        delta = self.compressor.expand(packed, self.shard.w.size)
        if not is_finite(delta.values):
            raise RemoteProtocolError("it holds values that are not finite, or its norm is not")
        return delta

    def _settle(self, outcomes: list[Outcome]) -> None:
        """Tell the workers what became of their pushes, and answer fetches that waited for it."""
        for outcome in outcomes:
            peer = self._peers.get(outcome.slot)
            if outcome.kind == APPLIED:
                self.staleness.add(outcome.staleness)
                self._held.discard((outcome.slot, outcome.epoch, outcome.seq))
            elif outcome.kind == HELD:
                self._held.add((outcome.slot, outcome.epoch, outcome.seq))
            else:
                self._count(outcome.kind)
            if peer is not None and self.deliveries.is_current(outcome.slot, outcome.epoch):
                self._ack(peer, outcome.seq, outcome.kind, outcome.staleness, slot=outcome.slot)
        self._answer_held_fetches()

    def _is_held(self, push: m.Push) -> bool:
        return (push.slot, push.epoch, push.seq) in self._held

    def _count(self, verdict: str) -> None:
        self.rates.add(_COUNTED[verdict], 1)

    def _ack(
        self, peer: Peer, seq: int, outcome: str, staleness: int = 0, reason: str = "", *, slot: int
    ) -> None:
        next_seq = self.deliveries.next_seq(slot)
        version = self.shard.version
        self.desk.send(
            peer,
            Ack(self.index, self.generation, seq, outcome, version, staleness, next_seq, reason),
        )

    # ------------------------------------------------------------ fetches

    def on_fetch(self, peer: Peer, fetch: m.Fetch) -> None:
        if not self._knows(fetch.slot, fetch.epoch):
            return
        if self.side.clock() >= fetch.clock_min:
            self._answer_fetch(peer, fetch)
        else:
            self._held_fetches[fetch.slot] = (peer, fetch)

    def _answer_held_fetches(self) -> None:
        clock = self.side.clock()
        for slot, (peer, fetch) in list(self._held_fetches.items()):
            if clock >= fetch.clock_min:
                del self._held_fetches[slot]
                self._answer_fetch(peer, fetch)

    def _answer_fetch(self, peer: Peer, fetch: m.Fetch) -> None:
        """A copy: the next push may be applied before the transport has sent this one."""
        values = self.shard.w.copy()
        self.rates.add("fetch_bytes", values.nbytes)
        version = self.shard.version
        self.desk.send(
            peer, m.Parameters(self.index, self.generation, fetch.request, version, values)
        )

    def on_push_buffers(self, peer: Peer, message: m.PushBuffers) -> None:
        if self.buffers is not None and self._knows(message.slot, message.epoch):
            self.buffers.push(message.slot, message.samples, message.values)

    def on_fetch_buffers(self, peer: Peer, message: m.FetchBuffers) -> None:
        if self.buffers is not None and self._knows(message.slot, message.epoch):
            average = self.buffers.average()
            self.desk.send(peer, m.Buffers(message.request, average, self.constant))

    def on_members(self, slots: frozenset[int]) -> None:
        if slots != self._members:
            self._members = slots
            self._settle(self.side.members(slots))
