"""A shard at work: workers join, push and fetch; the rules by which anything gets into it.

A push passes, in this order: which epoch (fencing), whose connection (only the one that has shown
the token of the epoch), which number (exactly once), what (sizes and indices within the shard,
every value finite), and only then the method's server side, which applies it, holds it in a barrier
or drops it. Of poison the server side is only told that it has come: others may wait for it. Then
all of it is committed: shard, numbers and whatever the method has to know; only then the ack goes
out. What is in no commit was never acknowledged, so a server that takes this one's place gets it
again. When a run ends, all that is left of it is its last checkpoint: from the moment when a shard
is saved for that, nothing gets into it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dlctl import messages as m
from dlctl.algorithms.base import Outcome, ShardSide
from dlctl.compress.base import Compressor, Delta
from dlctl.compress.values import Precision
from dlctl.errors import RemoteProtocolError
from dlctl.flat import AVERAGED, CONSTANT, Layout
from dlctl.machine import Peer
from dlctl.messages import APPLIED, DUPLICATE, FENCED, GAP, HELD, LATE, REFUSED, Ack
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.meters import Rates, Staleness
from dlctl.roles.protocol.token import is_genuine
from dlctl.roles.server.buffers import AveragedBuffers
from dlctl.roles.server.dedup import NEW, Dedup
from dlctl.roles.server.early_apply import EarlyApply
from dlctl.shards.base import Extras, Shard, W
from dlctl.shards.summary import Summary
from dlctl.vector import euclidean_norm

_COUNTED = {
    DUPLICATE: "duplicates", GAP: "gaps", FENCED: "fenced", LATE: "late", REFUSED: "refused",
}  # fmt: skip


class ShardProtocol:
    def __init__(
        self,
        context: Context,
        run_id: str,
        key: bytes,
        index: int,
        generation: int,
        assigned: m.Assign,
        shard: Shard,
        side: ShardSide,
        compressor: tuple[str, type[Compressor]],
        push_norm_max: float,
        fetch_values: Precision = "float32",
    ) -> None:
        self.context = context
        self.run_id = run_id
        self.key = key
        self.index = index
        self.generation = generation
        self.assigned = assigned
        self.shard = shard
        self.side = side
        self.compressor_name, self.compressor = compressor
        self.push_norm_max = push_norm_max
        self.summary = Summary(fetch_values)
        self.initialised = False
        self.last_checkpoint = 0
        """The run ends with it: nothing is applied any more, for it would be in no checkpoint."""
        self.useless = 0
        """Messages of workers that had no effect."""
        self.dedup = Dedup()
        self.buffers: AveragedBuffers | None = None
        self._told_of: dict[int, int] = {}
        """Slot -> its last epoch whose buffers were refused with a word in the log."""
        self.constant = np.zeros(0, np.float32)
        self.rates = Rates("pushes", "push_bytes", "fetch_bytes", *_COUNTED.values())
        self.staleness = Staleness()
        self._members: frozenset[int] = frozenset()
        self._peers: dict[int, Peer] = {}
        """Slot -> the connection that its newest epoch has joined on last."""
        self._refused: Counter[int] = Counter()
        """Slot -> pushes that were refused, of all its epochs."""
        self._head_start = EarlyApply(shard)
        self._held_fetches: dict[int, tuple[Peer, m.Fetch]] = {}

    def metrics(self, now: float) -> dict[str, Any]:
        poison = {f"worker-{slot}": count for slot, count in sorted(self._refused.items())}
        return {
            "version": self.shard.version,
            **self.rates.report(now),
            **self.staleness.report(),
            **({"poison": poison} if poison else {}),
            **({"last_checkpoint": self.last_checkpoint} if self.last_checkpoint else {}),
        }

    # ------------------------------------------------------------ what survives

    def resume(self) -> None:
        """Go on where the server before this one was. Raises Unusable."""
        meta = self.shard.resume()
        if not meta:
            return
        self.dedup.load(meta["deliveries"], meta["fates"])
        self._refused.update(dict(meta["refused"]))
        self.side.resume(meta["side"])
        self.initialised = meta["initialised"]
        self.last_checkpoint = meta.get("last_checkpoint", 0)
        if self.initialised:
            self._take_extras(self.shard.storage.extras)

    def begin_with(self, vectors: Mapping[str, m.Array], extras: Extras | None) -> None:
        """Take initial values, the model's or a checkpoint's: from now on there is a shard."""
        self.shard.storage.fill(vectors, extras)
        if extras is not None:
            self._take_extras(extras)
        self.initialised = True
        self.commit()

    def _take_extras(self, extras: Extras) -> None:
        """Shard 0 also holds what is not trained: averaged buffers and constant parameters.

        The buffers that survive are these first ones: replicas push theirs again.
        """
        if self.index == 0:
            layout = Layout.from_bytes(self.assigned.layout)
            self.buffers = AveragedBuffers(layout, np.array(extras.averaged, np.float64))
            self.constant = np.array(extras.constant, np.float32)

    def commit(self) -> None:
        """Make everything so far survive; before it nothing may be acknowledged."""
        if self.shard.storage.survives:
            self.shard.commit(
                {
                    "initialised": self.initialised,
                    "deliveries": self.dedup.to_json(),
                    "fates": self.dedup.fates(),
                    "refused": sorted(map(list, self._refused.items())),
                    "side": self.side.state(),
                    "last_checkpoint": self.last_checkpoint,
                }
            )

    def close(self, last_checkpoint: int) -> None:
        """Apply nothing from now on, nor any server that takes this one's place."""
        self.last_checkpoint = last_checkpoint
        self.commit()

    def reopen(self, last_checkpoint: int) -> None:
        """The run goes on: that one has failed, or nobody could write down that it was the last."""
        if last_checkpoint == self.last_checkpoint:
            self.last_checkpoint = 0
            self.commit()

    # ------------------------------------------------------------ workers join

    def on_join(self, peer: Peer, message: m.Join) -> None:
        if message.run_id != self.run_id:
            self.context.send(peer, m.Dismiss(f"this server belongs to run {self.run_id}"))
            return
        if not is_genuine(self.key, message.run_id, message.slot, message.epoch, message.token):
            self.context.note(
                "warning", f"worker-{message.slot}: the token of its epoch is not genuine"
            )
            return
        if self.dedup.is_fenced(message.slot, message.epoch):
            self.context.send(peer, m.Dismiss(f"worker-{message.slot} has been replaced"))
            return
        is_new = not self.dedup.is_current(message.slot, message.epoch)
        if is_new and self.last_checkpoint:
            return  # Barriers would let go of what they hold.
        if self.dedup.join(message.slot, message.epoch):
            self._held_fetches.pop(message.slot, None)
            self._head_start.ends(message.slot)
            self._peers[message.slot] = peer  # before what was settled is told to it
            self._settle(self.side.joined(message.slot), at_once=True)
        self._peers[message.slot] = peer
        self._answer_join(peer, message.slot)

    def _answer_join(self, peer: Peer, slot: int) -> None:
        self.context.send(
            peer,
            m.Joined(
                self.index, self.generation, self.shard.version, self.assigned.lo,
                self.assigned.hi, self.initialised, self.dedup.next_seq(slot),
            ),
        )  # fmt: skip

    def on_initialise(self, peer: Peer, message: m.Initialise) -> None:
        if not self._is_joined(peer, message.slot, message.epoch):
            return
        if not self.initialised:
            if not self._fits(message):
                self.context.note(
                    "error", "the model's initial values do not fit or are not finite"
                )
                return
            extras = Extras(message.averaged, message.constant) if self.index == 0 else None
            self.begin_with({W: message.values}, extras)
        self._answer_join(peer, message.slot)

    def _fits(self, message: m.Initialise) -> bool:
        layout = Layout.from_bytes(self.assigned.layout)
        extras = (message.averaged.size, message.constant.size)
        sizes = (layout.size(AVERAGED), layout.size(CONSTANT)) if self.index == 0 else (0, 0)
        is_whole = message.values.size == self.shard.size and extras == sizes
        arrays = (message.values, message.constant, message.averaged)
        is_typed = [array.dtype for array in arrays] == [np.float32, np.float32, np.float64]
        return is_whole and is_typed and bool(np.isfinite(message.values).all())

    def _is_joined(self, peer: Peer, slot: int, epoch: int) -> bool:
        """Whether a connection is that worker's; if not, it is asked to show its token."""
        known = self.dedup.is_current(slot, epoch) and self._peers.get(slot) == peer
        if not known:
            self._ask_to_join(peer)
        return known

    def _is_at_work(self, peer: Peer, slot: int, epoch: int) -> bool:
        """The same, and there are values to work on."""
        if not self.initialised:
            self._ask_to_join(peer)
        return self.initialised and self._is_joined(peer, slot, epoch)

    def _ask_to_join(self, peer: Peer) -> None:
        self.context.send(peer, m.JoinAgain(self.index, self.generation))

    # ------------------------------------------------------------ pushes

    def on_push(self, peer: Peer, push: m.Push) -> None:
        self.rates.add("push_bytes", push.delta.nbytes)
        if self.last_checkpoint:
            return
        verdict = self.dedup.judge(push)
        if verdict != NEW:
            self.useless += 1
        if verdict == FENCED:
            self._count(verdict)
            self._ack(peer, push.seq, verdict, slot=push.slot)
        elif push.generation != self.generation:
            self._ask_to_join(peer)
        elif not self._is_at_work(peer, push.slot, push.epoch):
            return
        elif verdict == NEW:
            self._take(push)
        else:
            self._count(verdict)
            fate = self.dedup.fate(push) if verdict == DUPLICATE else verdict
            self._ack(peer, push.seq, fate, slot=push.slot)

    def on_push_coming(self, peer: Peer, push: m.Push, come: Sequence[int]) -> None:
        """So many bytes of each of its arrays are there. What the shard makes of them counts for
        nothing until all of the push has come, and was taken.
        """
        is_theirs = self.initialised and self._peers.get(push.slot) == peer
        is_next = push.generation == self.generation and self.dedup.judge(push) == NEW
        is_open = not self.last_checkpoint
        if is_open and is_theirs and is_next and self.side.applies_as_pushed:
            self._head_start.comes(push, come)

    def _take(self, push: m.Push) -> None:
        try:
            delta = self._expand(push.delta)
        except RemoteProtocolError as error:
            self._refuse(push, error.message)
            return
        self.dedup.take(push)
        self.rates.add("pushes", 1)
        self._settle(self.side.push(push, delta))

    def _refuse(self, push: m.Push, why: str) -> None:
        """Poison: it never comes into the shard, and its number is used up."""
        reason = (
            f"refused a push of worker-{push.slot} (epoch {push.epoch}, number {push.seq}, "
            f"steps {push.first_step}..{push.last_step}): {why}"
        )
        self.context.note("warning", reason)
        self._head_start.ends(push.slot)
        self.dedup.take(push)
        self._settle(self.side.left_out(push, reason))

    def _expand(self, packed: m.Packed) -> Delta:
        """The delta of a push. Raises RemoteProtocolError for anything that must not get in."""
        if packed.kind != self.compressor_name:
            raise RemoteProtocolError(f'compressed with "{packed.kind:.20}", not as the job says')
        delta = self.compressor.expand(packed, self.shard.size)
        norm = euclidean_norm(delta.values)
        if not math.isfinite(norm):
            raise RemoteProtocolError("it holds values that are not finite, or its norm is not")
        if norm > self.push_norm_max:
            limit = f"servers.push_norm_max = {self.push_norm_max:g}"
            raise RemoteProtocolError(f"its norm is {norm:.3g}, above {limit}")
        return delta

    def _settle(self, outcomes: list[Outcome], *, at_once: bool = False) -> None:
        """Commit what became of pushes, tell their workers, and answer fetches that waited for it.

        at_once: something else has changed, too; commit also if nothing was settled.
        """
        for slot, epoch, seq, kind, *_ in outcomes:
            if kind == HELD:
                self.dedup.hold(slot, epoch, seq)
            else:
                self.dedup.settle(slot, epoch, seq, kind)
            if kind == REFUSED:
                self._refused[slot] += 1
        if at_once or any(outcome.kind != HELD for outcome in outcomes):
            self.commit()
        for outcome in outcomes:
            peer = self._peers.get(outcome.slot)
            if outcome.kind == APPLIED:
                self.staleness.add(outcome.staleness)
            elif outcome.kind != HELD:
                self._count(outcome.kind)
            if peer is not None and self.dedup.is_current(outcome.slot, outcome.epoch):
                self._ack(peer, *outcome[2:], slot=outcome.slot)
        self._answer_held_fetches()

    def _count(self, verdict: str) -> None:
        self.rates.add(_COUNTED[verdict], 1)

    def _ack(
        self, peer: Peer, seq: int, outcome: str, staleness: int = 0, reason: str = "", *, slot: int
    ) -> None:
        next_seq = self.dedup.next_seq(slot)
        version = self.shard.version
        self.context.send(
            peer,
            Ack(self.index, self.generation, seq, outcome, version, staleness, next_seq, reason),
        )

    # ------------------------------------------------------------ fetches

    def on_fetch(self, peer: Peer, fetch: m.Fetch) -> None:
        if not self._is_at_work(peer, fetch.slot, fetch.epoch):
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
        """With what has changed since the version that the worker has, if that is known here."""
        shard = self.shard
        of = (self.index, self.generation, fetch.request, shard.version)
        seen = shard.w if fetch.exact else self._seen()
        changes = None
        if fetch.have_generation == self.generation:
            changes = shard.changes_since(fetch.have_version, seen)
        if changes is None:
            self.rates.add("fetch_bytes", seen.nbytes)
            remembered = shard.history.reaches(shard.version)
            self.context.send(peer, m.Parameters(*of, seen, remembered, clock=self.side.clock()))
        else:
            self.rates.add("fetch_bytes", changes.values.nbytes + changes.positions.nbytes)
            self.context.send(
                peer, m.SparseParameters(*of, fetch.have_version, *changes, clock=self.side.clock())
            )

    def _seen(self) -> m.Array:
        """What workers get of the present version."""
        precision = self.summary.precision
        seen = self.summary.of(self.shard)
        if self.summary.precision != precision:
            self.context.note(
                "warning", f"a parameter is too large for {precision}: from now on all are float32"
            )
        return seen

    def on_push_buffers(self, peer: Peer, message: m.PushBuffers) -> None:
        if self.buffers is not None and self._is_at_work(peer, message.slot, message.epoch):
            taken = self.buffers.push(message.slot, message.samples, message.values)
            self.buffers.keep(self._members)
            if not taken and self._told_of.get(message.slot) != message.epoch:
                self._told_of[message.slot] = message.epoch
                what = "its buffers do not fit or are not finite; those before stay"
                self.context.note("warning", f"worker-{message.slot}: {what}")

    def on_fetch_buffers(self, peer: Peer, message: m.FetchBuffers) -> None:
        if self.buffers is not None and self._is_at_work(peer, message.slot, message.epoch):
            average = self.buffers.average()
            self.context.send(peer, m.Buffers(message.request, average, self.constant))

    def on_members(self, slots: frozenset[int]) -> None:
        if slots != self._members and not self.last_checkpoint:
            self._members = slots
            self._head_start.keep(slots)
            self._settle(self.side.members(slots), at_once=True)
