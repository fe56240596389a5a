"""A running shard of one table: the rules by which a push gets into it, and how it is read.

A push passes these checks in order: its term (fencing), its connection (only the one that has
presented the token of the term), its number (exactly once), its content (sizes and indices within
the shard, every value finite). Then the method's shard side applies it, holds it in a barrier,
buffers it or drops it. Of an invalid push the shard side is only notified, since others may wait
for it. Then everything is committed: shard, numbers and the state of the method. The ack leaves
when that commit is durable (`commits.py`). Before that the push was never acknowledged, so it is
resent to a server that replaces this one.

Each table has numbers, a version, a clock and commits of its own: the tables of a server share
nothing but the set of joined workers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field

import numpy as np

from dlctl.algorithms.base import PushOutcome, ShardSide, Table
from dlctl.compress.base import Compressor, Delta
from dlctl.compress.plain import expand, whole_values
from dlctl.compress.values import Precision
from dlctl.errors import RemoteProtocolError
from dlctl.model.vector import euclidean_norm
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.meters import Rates, Staleness
from dlctl.roles.server.commits import Commits
from dlctl.roles.server.dedup import NEW, Dedup
from dlctl.roles.server.held_fetches import HeldFetches
from dlctl.shards.base import Shard, W
from dlctl.shards.rows import RowSlice
from dlctl.shards.summary import Summary
from dlctl.util import threads
from dlctl.util.names import AVERAGE
from dlctl.wire import messages as m
from dlctl.wire.machine import Peer
from dlctl.wire.messages import Json


class EarlyApply:
    """Selects the push that a shard processes while it arrives: one at a time, and none twice."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._begun: dict[int, tuple[int, int]] = {}
        """Slot -> term and number of its newest push that was begun. A push that was abandoned,
        because another one was applied first, is not begun again: on a slow link that could happen
        any number of times."""
        self._holder = -1
        """The slot whose push was begun last."""
        self._waiting = -1
        """The slot whose push found the shard busy since the begun push last made progress."""

    def comes(self, push: m.Push, come: Sequence[int]) -> None:
        """`come` bytes of each array have arrived of a push that may be the next one."""
        values = whole_values(push.delta)
        if values is None or values.size != self.shard.size:
            return
        slot, which = push.slot, (push.term, push.seq)
        count = min(come[0] // values.itemsize, values.size)
        is_new = self._begun.get(slot) != which
        if is_new and self._waiting == slot:
            self.shard.forget_prepared()  # The begun push has stalled, or is slower.
        if self.shard.prepare(values, count, is_new=is_new):
            self._begun[slot] = which
            self._holder, self._waiting = slot, -1
        elif is_new:
            self._waiting = slot

    def ends(self, slot: int) -> None:
        """Drop a begun push of this worker: it will not be applied."""
        if self._holder == slot:
            self.shard.forget_prepared()
            self._holder = -1

    def keep(self, slots: frozenset[int]) -> None:
        """Drop a begun push of a worker that has none of these slots."""
        if self._holder not in slots:
            self.ends(self._holder)


COUNTED = {
    m.DUPLICATE: "duplicates", m.GAP: "gaps", m.FENCED: "fenced", m.LATE: "late",
    m.REFUSED: "refused",
}  # fmt: skip
RATES = ("pushes", "push_bytes", "fetch_bytes", *COUNTED.values())
EARLY_MIN = threads.PART
"""Elements of a push whose values are checked block by block while its update is prepared; those of
a smaller one stay in the processor's cache anyway."""


@dataclass(kw_only=True, eq=False)
class TableShard:
    context: Context
    commits: Commits
    """The commits of the server, which are those of all its tables."""
    declared: Table
    table: int
    index: int
    term: int
    lo: int
    hi: int
    """This shard holds the elements [lo, hi) of the table."""
    shard: Shard
    side: ShardSide
    compressor_name: str
    compressor: type[Compressor]
    push_norm_max: float
    fetch_values: InitVar[Precision]
    step_samples: int
    """The most samples of one step of a worker."""
    rows: RowSlice | None = None
    """The rows that this shard holds, if the table is one of rows."""
    seed: int = 0
    """The initial values of the rows are derived from it."""
    peers: Mapping[int, Peer] = field(default_factory=dict)
    """Slot -> the connection of its newest term. The tables of a server share it, and `rates`."""
    rates: Rates = field(default_factory=lambda: Rates(*RATES))
    staleness: Staleness = field(default_factory=Staleness)
    is_paused: Callable[[], bool] = lambda: False
    """Whether the server has paused (`Pause`)."""
    take_buffers: Callable[[m.Push], None] = lambda push: None
    """Called with a push that was applied and has buffers, before its commit."""
    more_state: Callable[[], Json] = dict
    """State that a commit stores besides this table's own."""
    refused: Counter[int] = field(default_factory=Counter)
    """Slot -> pushes that were refused, of all its terms; in the commit that settles them."""
    newest_op: int = -1
    """The number of the newest operation of the lead that has changed the table."""
    dedup: Dedup = field(default_factory=Dedup)

    def __post_init__(self, fetch_values: Precision) -> None:
        self.summary = Summary(fetch_values)
        self._early_apply = EarlyApply(self.shard)
        self._committed = 0
        """The version of the newest commit, which may be under way."""
        self._newest_base = 0
        """The number of the newest commit with a base: until that is written, no journal is started
        over, so the memory holds one copy of the table at most, however slow the disk is."""
        if self.rows is not None:
            self.shard.remembers = False  # No worker has all of it.
        self._held_fetches = HeldFetches()
        self._looked_at: tuple[int, bool] | None = None
        """The clock, and whether the server had paused, when all held reads were looked at; None:
        not all of them were at the same."""

    def begin_rows(self) -> None:
        """Initialise the rows of a new run, if it is a table of rows."""
        if self.rows is not None:
            self.shard.storage.fill({W: self.rows.initial(self.seed)}, None)

    # ------------------------------------------------------------ what survives

    def commit(self, *, in_order: bool = False) -> None:
        """Commit everything so far; what is sent from now on depends on it. in_order: see
        `Commits.begin`.
        """
        self._committed = self.shard.version
        if not self.shard.storage.survives:
            return
        meta = {
            "deliveries": self.dedup.to_json(),
            "fates": self.dedup.outcomes(),
            "side": self.side.state(),
            "refused": sorted(map(list, self.refused.items())),
            "op": self.newest_op,
            **self.more_state(),
        }
        write = self.shard.record(meta, may_rotate=self._newest_base <= self.commits.durable)
        if write is not None:
            number = self.commits.begin(write, in_order=in_order)
            self._newest_base = number if write.base else self._newest_base

    def resume(self) -> Json:
        """Resume from the last commit of the server before this one; returns its state, {} if there
        was none. Raises Unusable.
        """
        meta = self.shard.resume()
        if meta:
            self.dedup.load(meta["deliveries"], meta["fates"])
            self.side.resume(meta["side"])
            self.refused.update(dict(meta["refused"]))
            self.newest_op = meta["op"]
        return meta

    def state(self, *, for_cut: bool) -> Json:
        """The shard's state, for a checkpoint's manifest. for_cut: for that of a run under way,
        whose workers go on with their numbers.
        """
        return {
            **({"fates": self.dedup.outcomes()} if for_cut else {}),
            "lo": self.lo,
            "hi": self.hi,
            "dtype": self.declared.dtype,
            "version": self.shard.version,
            "samples": self.shard.samples,
            "counters": dict(self.shard.optimizer.counters),
            "deliveries": self.dedup.to_json(),
            "side": self.side.state(),
            "op": self.newest_op,
        }

    def restore(self, state: Json, own: Json | None = None) -> None:
        """Resume from a checkpoint. Terms are never issued twice, so push numbers start over; of
        earlier terms only the highest numbers are stored.

        own: the state of the shard with this number, whose workers go on: so do their numbers.
        """
        counters = self.shard.optimizer.counters
        # Drop the counters of another optimiser: the next server could not resume with them.
        counters.update({k: n for k, n in state.get("counters", {}).items() if k in counters})
        self.shard.restore(state["version"], state.get("samples", 0))
        if own is None:
            self.dedup.remember(state.get("deliveries", []))
        else:
            self.dedup.load(own["deliveries"], own["fates"])
        self.newest_op = state.get("op", -1)
        if side := state.get("side"):
            self.side.restore(side)

    # ------------------------------------------------------------ members

    def join(self, slot: int, term: int) -> bool:
        """A worker joins or rejoins. True if this is a new term of the slot on this table."""
        if self._ignores_members() or not self.dedup.join(slot, term):
            return False
        self._held_fetches.forget(slot)
        self._early_apply.ends(slot)
        self.settle(self.side.joined(slot), has_changed=True)
        return True

    def members(self, slots: frozenset[int]) -> None:
        if self._ignores_members():
            return
        self._early_apply.keep(slots)
        self.settle(self.side.members(slots), has_changed=True)

    def _ignores_members(self) -> bool:
        """Whether the table can ignore joins, which saves one commit per joining worker."""
        return self.table > 0 and not self.side.takes_pushes

    # ------------------------------------------------------------ the lead's operations

    def change(self, values: Delta, number: int) -> None:
        """Take the values of all elements of operation `number`. Raises Diverged."""
        self.shard.lr = 0.0  # The old values are overwritten: `optim.plain.Accrue`.
        self.shard.apply(values)
        self.newest_op = number
        self.commit(in_order=True)
        self._answer_held_fetches()

    # ------------------------------------------------------------ pushes

    def on_push(self, peer: Peer, push: m.Push, verdict: str) -> None:
        """Take a push of a worker that has joined on this connection, unless it is FENCED; verdict:
        `Dedup.judge` of it. Raises RemoteProtocolError for a table that no replica pushes to.
        """
        if not self.side.takes_pushes:
            raise RemoteProtocolError(f'no replica pushes to table "{self.declared.name}"')
        if verdict == NEW:
            self._take(push)
            return
        self.rates.add(COUNTED[verdict], 1)
        outcome = self.dedup.outcome_of(push) if verdict == m.DUPLICATE else verdict
        self.ack(peer, push.seq, outcome, slot=push.slot)

    def on_push_coming(self, push: m.Push, come: Sequence[int]) -> None:
        """`come` bytes of each array of a push have arrived. What the shard does with them has no
        effect until the whole push has arrived and was accepted.
        """
        is_next = self.dedup.judge(push) == NEW and not push.is_part
        if is_next and self.side.applies_as_pushed:
            self._early_apply.comes(push, come)

    def _take(self, push: m.Push) -> None:
        try:
            self._check_samples(push)
            delta = self._expand(push)
        except RemoteProtocolError as error:
            self._refuse(push, error.message)
            return
        self.dedup.take(push)
        self.rates.add("pushes", 1)
        outcomes = self.side.push(push, delta)
        self._early_apply.ends(push.slot)  # If it was dropped, its memory is not kept.
        self._settle_push(push, outcomes)

    def _refuse(self, push: m.Push, why: str) -> None:
        """Reject an invalid push: it never gets into the shard, and its number is consumed."""
        reason = (
            f"refused a push of worker-{push.slot} (term {push.term}, number {push.seq}, "
            f"steps {push.first_step}..{push.last_step}): {why}"
        )
        self.context.note("warning", reason)
        self._early_apply.ends(push.slot)
        self.dedup.take(push)
        self._settle_push(push, self.side.left_out(push, reason))

    def _settle_push(self, push: m.Push, outcomes: list[PushOutcome]) -> None:
        """Raises TypeError for a method that breaks the promise on which exactly-once rests."""
        which = (push.slot, push.term, push.seq)
        if all(outcome[:3] != which for outcome in outcomes or ()):
            raise TypeError(
                f"{type(self.side).__module__}: push() has to return an outcome of the push that it"
                " is given, push.outcome(...), and may add those of pushes that it held"
            )
        if push.buffers.arrays and any(o[:4] == (*which, m.APPLIED) for o in outcomes):
            self.take_buffers(push)
        self.settle(outcomes)

    def _check_samples(self, push: m.Push) -> None:
        """Means and schedules weigh a push by its samples. Raises RemoteProtocolError for more than
        its steps can have.
        """
        most = max(0, push.last_step - push.first_step + 1) * self.step_samples
        if push.samples > most:
            raise RemoteProtocolError(f"it claims {push.samples} samples; its steps have {most}")

    def _expand(self, push: m.Push) -> Delta:
        """The delta of a push. Raises RemoteProtocolError for anything that must not get in."""
        packed = push.delta
        length = packed.length if push.is_part else self.shard.size
        if push.at + length > self.shard.size:
            raise RemoteProtocolError(
                f"it is of {length} elements from {push.at} on, of {self.shard.size}"
            )
        if self.rows is not None and (push.is_part or push.at):
            raise RemoteProtocolError("a push of rows cannot be split into parts")
        if self.rows is not None:
            delta = self.rows.expand(packed)
        elif packed.kind != self.compressor_name:
            raise RemoteProtocolError(f'compressed with "{packed.kind:.20}", not as the job says')
        else:
            delta = expand(self.compressor, packed, length)
        self._check_norm(push, delta)
        if not push.is_part:
            return delta
        where = np.arange(length) if delta.indices is None else delta.indices
        return Delta(delta.values, where + push.at)

    def _check_norm(self, push: m.Push, delta: Delta) -> None:
        """Raises RemoteProtocolError for NaN, an infinity, or too large a norm."""
        if delta.values.size >= EARLY_MIN:
            self.on_push_coming(push, [array.nbytes for array in push.delta.arrays])
        if self.shard.is_shorter(delta, self.push_norm_max):
            return
        norm = euclidean_norm(delta.values)
        if not math.isfinite(norm):
            raise RemoteProtocolError("it holds values that are not finite, or its norm is not")
        limit = f"servers.push_norm_max = {self.push_norm_max:g}"
        raise RemoteProtocolError(f"its norm is {norm:.3g}, above {limit}")

    def settle(self, outcomes: list[PushOutcome], *, has_changed: bool = False) -> None:
        """Commit the outcomes of pushes, ack them, and answer fetches that waited for them.

        has_changed: something besides the shard has, so that it is committed in any case.
        """
        for slot, term, seq, kind, *_ in outcomes:
            self.dedup.settle(slot, term, seq, kind)
            if kind == m.REFUSED:
                self.refused[slot] += 1
        has_changed |= self.shard.version != self._committed
        if has_changed or any(outcome.kind != m.HELD for outcome in outcomes):
            self.commit()
        for outcome in outcomes:
            peer = self.peers.get(outcome.slot)
            if outcome.kind in (m.APPLIED, m.BUFFERED):
                self.staleness.add(outcome.staleness)
            elif outcome.kind != m.HELD:
                self.rates.add(COUNTED[outcome.kind], 1)
            if peer is not None and self.dedup.is_current(outcome.slot, outcome.term):
                self.ack(peer, *outcome[2:], slot=outcome.slot)
        self._answer_after(outcomes)

    def ack(
        self, peer: Peer, seq: int, outcome: str, staleness: int = 0, reason: str = "", *, slot: int
    ) -> None:
        next_seq = self.dedup.next_seq(slot)
        of = (self.shard.version, staleness, next_seq, reason, self.table)
        self.context.send(peer, m.Ack(self.index, self.term, seq, outcome, *of))

    # ------------------------------------------------------------ reads

    def on_fetch(self, peer: Peer, fetch: m.Fetch | m.FetchRows) -> None:
        """Answer a read, or hold it. Raises RemoteProtocolError for what does not exist."""
        if isinstance(fetch, m.Fetch):
            self._check(fetch)
        elif self.rows is None:
            raise RemoteProtocolError(f'table "{self.declared.name}" has no rows')
        else:
            self.rows.check(fetch.rows)
        if self._may_answer(fetch):
            self._answer_fetch(peer, fetch)
            return
        self._held_fetches.hold(peer, fetch)
        if self._now() != self._looked_at:
            self._looked_at = None

    def _check(self, fetch: m.Fetch) -> None:
        """Raises RemoteProtocolError for a fetch of elements or rows that do not exist."""
        is_range = fetch.lo > 0 or fetch.hi > 0
        if is_range and not fetch.lo < fetch.hi <= self.shard.size:
            raise RemoteProtocolError(f"[{fetch.lo}, {fetch.hi}) of {self.shard.size} elements")
        if fetch.average and (AVERAGE not in self.shard.slots or fetch.have_term):
            raise RemoteProtocolError("there is no average, or no change of one")

    def resume_reads(self) -> None:
        """Answer the reads that have waited for the end of a pause."""
        self._answer_held_fetches()

    def _may_answer(self, fetch: m.Fetch | m.FetchRows) -> bool:
        if self.is_paused():
            return False
        has_own = self.dedup.settled(fetch.slot) >= fetch.after
        return has_own and self.side.may_read(fetch.slot, fetch.clock_min)

    def _now(self) -> tuple[int, bool]:
        return self.side.clock(), self.is_paused()

    def _answer_after(self, outcomes: list[PushOutcome]) -> None:
        """Where the method has no rule of its own, reads of others wait for the clock."""
        slots = {outcome.slot for outcome in outcomes}
        is_by_clock = type(self.side).may_read is ShardSide.may_read
        if len(slots) == 1 and is_by_clock and self._now() == self._looked_at:
            self._answer_held_fetches(*slots)
        else:
            self._answer_held_fetches()

    def _answer_held_fetches(self, slot: int | None = None) -> None:
        """slot: only its reads may be answerable."""
        if slot is None:
            self._looked_at = self._now()
        for peer, fetch in self._held_fetches.take(self._may_answer, slot):
            self._answer_fetch(peer, fetch)

    def _answer_fetch(self, peer: Peer, fetch: m.Fetch | m.FetchRows) -> None:
        """Send the changes since the version that the worker has, if they are known here."""
        shard = self.shard
        state = (self.table, self.side.clock(), shard.samples)
        if isinstance(fetch, m.FetchRows):
            assert self.rows is not None
            values = self.rows.take(shard.w, fetch.rows)
            self.rates.add("fetch_bytes", values.nbytes)
            of = (self.index, self.term, fetch.request, shard.version)
            self.context.send(peer, m.Parameters(*of, values, False, *state))
            return
        shown = None if fetch.exact else self.side.shown(fetch.slot)
        version, seen = shown or (shard.version, self._requested(fetch))
        of = (self.index, self.term, fetch.request, version)
        changes = None
        if shown is None and fetch.have_term == self.term and not fetch.hi:
            changes = shard.changes_since(fetch.have_version, seen)
        if changes is None:
            values = seen[fetch.lo : fetch.hi] if fetch.hi else seen
            self.rates.add("fetch_bytes", values.nbytes)
            is_present = shown is None and not fetch.hi
            remembered = is_present and shard.history.reaches(shard.version)
            self.context.send(peer, m.Parameters(*of, values, remembered, *state))
        else:
            self.rates.add("fetch_bytes", changes.values.nbytes + changes.positions.nbytes)
            self.context.send(peer, m.SparseParameters(*of, fetch.have_version, *changes, *state))

    def _requested(self, fetch: m.Fetch) -> m.Array:
        """The current version: its average, exact, or as workers get it."""
        if fetch.average:
            return self.shard.slots[AVERAGE]
        if fetch.exact:
            return self.shard.w
        precision = self.summary.precision
        seen = self.summary.of(self.shard)
        if self.summary.precision != precision:
            self.context.note(
                "warning", f"a parameter is too large for {precision}: from now on all are float32"
            )
        return seen
