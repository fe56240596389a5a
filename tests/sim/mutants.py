"""Deliberate bugs, one function each, that the simulator has to find: the proof that it looks.

A mutant is switched on for all daemons of a run. It is caught when a run of its scenario breaks a
promise within `seeds` seeds, and by one of the checkers that are named: a bug that is found only by
chance, by another one, is a promise that nobody guards.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from planting import MUTANTS as MUTANTS
from planting import Patch, mutant

from dlctl import messages as m
from dlctl.algorithms.base import Decision, Outcome, View
from dlctl.algorithms.local_sgd import Replica
from dlctl.algorithms.needs import Gradient, Read, Settle, Write
from dlctl.algorithms.quorum import Chosen
from dlctl.algorithms.sync import Barrier
from dlctl.algorithms.sync import Replica as SyncReplica
from dlctl.algorithms.tables import Parts
from dlctl.compress.topk import TopK
from dlctl.messages import APPLIED, BUFFERED, DUPLICATE
from dlctl.roles.agent.agent import Agent
from dlctl.roles.coordinator.coordinator import Coordinator
from dlctl.roles.coordinator.driven import DrivenMethod
from dlctl.roles.coordinator.groups import Groups
from dlctl.roles.coordinator.leases import LeaseScheduler
from dlctl.roles.coordinator.norms import Norms
from dlctl.roles.coordinator.persistence import Lasting, Persistence
from dlctl.roles.coordinator.portions import Leases, PortionPool, Range
from dlctl.roles.coordinator.quorum import Quorums
from dlctl.roles.coordinator.records import IssueTerm
from dlctl.roles.coordinator.registration import Registration
from dlctl.roles.coordinator.scaling import Scaling
from dlctl.roles.coordinator.shutdown import RunShutdown
from dlctl.roles.coordinator.streams import StreamPool
from dlctl.roles.protocol.retry import Retries
from dlctl.roles.server.dedup import NEW, Dedup
from dlctl.roles.server.server import Server
from dlctl.roles.server.shard_protocol import ShardProtocol
from dlctl.roles.server.table_shard import TableShard
from dlctl.roles.server.telling import AsksLead
from dlctl.roles.server.vectors import OPS_MAX, Vectors
from dlctl.roles.worker.basis import Basis
from dlctl.roles.worker.fetching import Fetcher
from dlctl.roles.worker.joining import Joining
from dlctl.roles.worker.leases import Portions
from dlctl.roles.worker.services.asking import Asking
from dlctl.roles.worker.services.computing import Computing, Engines
from dlctl.roles.worker.services.reading import OneRead
from dlctl.roles.worker.services.writing import Writing
from dlctl.roles.worker.shard_client import ShardClient
from dlctl.roles.worker.training import Training
from dlctl.roles.worker.worker import Worker
from dlctl.shards.ahead import Ahead
from dlctl.shards.history import History
from dlctl.shards.journaled import Journaled
from dlctl.shards.mapped import Mapped
from dlctl.shards.undo import Undo
from dlctl.sim import group
from dlctl.sim.states import KeptStates

# ---------------------------------------------------------------- exactly once


@mutant("a push that comes again is applied again", "LedgerChecker", "StalenessChecker")
def no_dedupe(patch: Patch) -> None:
    honest = Dedup.judge

    def judge(self, push):
        verdict = honest(self, push)
        if verdict == DUPLICATE:
            self._slots[push.slot].next_seq = push.seq
            return NEW
        return verdict

    patch.setattr(Dedup, "judge", judge)


@mutant("what was lost on the way is skipped", "AcksChecker")
def no_gaps(patch: Patch) -> None:
    def judge(self, push):
        slot = self._slots[push.slot]
        if push.seq < slot.next_seq:
            return DUPLICATE
        slot.next_seq = push.seq
        return NEW

    patch.setattr(Dedup, "judge", judge)


@mutant("every fifth push is acknowledged and not applied", "AcksChecker")
def ack_before_apply(patch: Patch) -> None:
    honest = TableShard._take

    def take(self, push):
        if push.seq % 5 != 3:
            return honest(self, push)
        self.dedup.take(push)
        return self.ack(self.peers[push.slot], push.seq, APPLIED, slot=push.slot)

    patch.setattr(TableShard, "_take", take)


@mutant("a push is acknowledged before it is committed", "AcksChecker")
def ack_before_commit(patch: Patch) -> None:
    honest = TableShard.commit

    def commit(self):
        if self.shard.version % 4 != 3:
            honest(self)

    patch.setattr(TableShard, "commit", commit)


@mutant("a worker calls its portion done when it is pushed, not when it is settled", "AcksChecker")
def done_before_ack(patch: Patch) -> None:
    honest = Training._on_pushed

    def on_pushed(self):
        honest(self)
        self.computing.report_done(self.portions.settled(self.writing.newest), 0.0)

    patch.setattr(Training, "_on_pushed", on_pushed)


@mutant("a push carries other gradients when it is sent again", "Book", scenario="downpour-topk")
def retry_is_changed(patch: Patch) -> None:
    honest = Retries._repeat

    def repeat(self, item, now):
        if isinstance(item.message, m.Push):
            values, positions = item.message.delta.arrays
            delta = replace(item.message.delta, arrays=(np.zeros_like(values), positions))
            item.message = replace(item.message, delta=delta)
        return honest(self, item, now)

    patch.setattr(Retries, "_repeat", repeat)


@mutant("what a sparse push leaves behind is forgotten", "AcksChecker", scenario="downpour-topk")
def residual_is_lost(patch: Patch) -> None:
    honest = TopK.take

    def take(self, u, shard=0):
        packed = honest(self, u, shard)
        u[:] = 0
        return packed

    patch.setattr(TopK, "take", take)


@mutant("the residual is emptied when the data ends", "LedgerChecker", scenario="downpour-topk")
def residual_is_dropped_at_the_end(patch: Patch) -> None:
    honest = Worker._on_shutdown

    def on_shutdown(self, message, now):
        if self.training is not None:
            self.training.side.residual[:] = 0
        honest(self, message, now)

    patch.setitem(Worker._FROM_COORDINATOR, m.Shutdown, on_shutdown)


@mutant("a barrier counts workers and not their samples", "LedgerChecker", scenario="sync", first=5)
def mean_of_means(patch: Patch) -> None:
    honest = Barrier._update

    def update(self, clock):
        for key, held in list(self._held.items()):
            self._held[key] = held._replace(push=replace(held.push, samples=1))
        return honest(self, clock)

    patch.setattr(Barrier, "_update", update)


# ---------------------------------------------------------------- local SGD


@mutant(
    "steps that are made while the mean is under way are wiped out by it", "OwnStepsChecker",
    scenario="local-sgd",
)  # fmt: skip
def steps_under_way_are_wiped_out(patch: Patch) -> None:
    def placed(self, lo, hi):
        if self._base is not None:
            self._base[lo:hi] = self.parameters[lo:hi]

    patch.setattr(Replica, "placed", placed)


@mutant(
    "what a push has left behind is taken for steps of the next round", "OwnStepsChecker",
    scenario="local-sgd", first=5,
)  # fmt: skip
def leftovers_are_steps(patch: Patch) -> None:
    def placed(self, lo, hi):
        if self._is_ahead:
            self.parameters[lo:hi] -= self.residual[lo:hi]
        if self._base is not None:
            self._base[lo:hi] = self.parameters[lo:hi]

    patch.setattr(Replica, "placed", placed)


@mutant(
    "steps since the push are lost when a mean is placed", "OwnStepsChecker", scenario="local-sgd"
)
def steps_are_lost_to_a_mean(patch: Patch) -> None:
    def placing(self, lo, hi):
        if self._base is not None:
            self._base[lo:hi] = 0

    patch.setattr(Replica, "placing", placing)


@mutant(
    "a replica pushes its next round before the mean of this one has come", "OwnStepsChecker",
    scenario="local-sgd", first=5,
)  # fmt: skip
def a_round_further_ahead(patch: Patch) -> None:
    honest = Replica.run

    def run(self):
        requests, value = honest(self), None
        while True:
            request = requests.send(value)
            if self._is_ahead and isinstance(request, Read) and self.residual.any():
                self.view = View(request.at_least, request.at_least)
                request = replace(request, wait=False)
            value = yield request

    patch.setattr(Replica, "run", run)
    patch.setattr(OneRead, "serves", lambda self, other: True)


@mutant("a round that the end of the data cuts short is not pushed", "AcksChecker", "LedgerChecker",
    scenario="local-sgd", first=1,
)  # fmt: skip
def short_rounds_are_dropped(patch: Patch) -> None:
    def accrue(self):
        self._is_on_way = True
        self._base = self.parameters.copy()
        steps = samples = 0
        while steps < self.options.local_steps:
            computed = yield Gradient(step=True, gather=False)
            if computed is None:
                self._base[:] = self.parameters
                return 0
            steps += 1
            samples += computed.samples
        return samples

    patch.setattr(Replica, "_accrue", accrue)


@mutant(
    "a server that stands still is replaced before it is dead, and its state taken from it",
    "TermsChecker", seeds=10, first=63,
)  # fmt: skip
def two_servers_of_one_shard(patch: Patch) -> None:
    """As if an agent did not kill, and no lock kept the next one out."""
    honest_kill, honest_take = Agent._on_kill, KeptStates._take

    def on_kill(self, message, now):
        child = self._children.get(message.name)
        if child is None or not child.alive or not message.name.startswith("server"):
            honest_kill(self, message, now)
            return
        child.exited = m.ProcessExited(message.name, message.incarnation, -9, (), "")
        self._report_exit(child.exited, now)

    def take(self, spec):
        kept = self.kept.get(spec.shard)
        if kept is not None and kept.holder not in (None, self.process):
            kept.holder.given_up = True
        return honest_take(self, spec)

    patch.setattr(Agent, "_on_kill", on_kill)
    patch.setattr(KeptStates, "_take", take)


# ---------------------------------------------------------------- the steps of a barrier


@mutant("who waits for the next step takes the one that there is", "ClockChecker", scenario="sync")
def the_next_step_is_not_waited_for(patch: Patch) -> None:
    honest = Fetcher.start
    patch.setattr(Fetcher, "start", lambda self, clock_min, **how: honest(self, 0, **how))


@mutant(
    "a gradient is computed although its shards are at different steps", "ClockChecker",
    scenario="sync-recovery", seeds=10, first=232,
)  # fmt: skip
def shards_may_be_steps_apart(patch: Patch) -> None:
    def next_step(self, clock):
        return (yield Read(wait=True, at_least=clock + 1)).clock_max

    def meet(self, clock):
        yield Write(vector=None, clock=clock)
        return (yield Read(wait=True, at_least=clock + 1)).clock_max

    patch.setattr(SyncReplica, "_next_step", next_step)
    patch.setattr(SyncReplica, "_meet", meet)


# ---------------------------------------------------------------- batches of portions


@mutant(
    "a portion of a batch counts twice", "SameResult", scenario="sandblaster", seeds=30, first=2
)
def portion_counts_twice(patch: Patch) -> None:
    honest = Parts.push

    def push(self, push, delta):
        self._parts = 0
        return honest(self, push, delta)

    patch.setattr(Parts, "push", push)


@mutant(
    "an operation of the lead is made twice", "SameResult", scenario="sandblaster", first=29,
)  # fmt: skip
def operation_is_made_twice(patch: Patch) -> None:
    honest = Vectors.run

    def run(self, message):
        for table in self._tables.values():
            if table.newest_op // OPS_MAX == message.number:
                table.newest_op = -1
        return honest(self, message)

    patch.setattr(Vectors, "run", run)


@mutant(
    "a request leaves before the result it follows from is on record", "SameResult",
    scenario="sandblaster", first=31,
)  # fmt: skip
def the_journal_is_behind(patch: Patch) -> None:
    honest = DrivenMethod.to_json

    def to_json(self):
        journal = honest(self)
        return journal | {"results": journal["results"][:-1]}

    patch.setattr(DrivenMethod, "to_json", to_json)


@mutant(
    "a portion of the dead goes to nobody, although another one has a backup copy of it",
    "LivenessChecker", scenario="sandblaster", first=12,
)  # fmt: skip
def copies_die_with_the_original(patch: Patch) -> None:
    honest = Leases.release

    def release(self, slot):
        mine = {key for key, owner in self._leased.items() if owner == slot}
        copied = mine & self._copies.keys()
        back = honest(self, slot)
        for key in copied:
            self._leased.pop(key, None)
        return back

    patch.setattr(Leases, "release", release)


# ---------------------------------------------------------------- epochs


@mutant("a slot's epoch is not raised for its next worker", "TermsChecker")
def epoch_is_not_raised(patch: Patch) -> None:
    def issue_term(self, daemon):
        if daemon.role != "agent":
            daemon.term = self._terms.setdefault(daemon.name, 1)
            self.context.do(IssueTerm(daemon.name, daemon.term))

    patch.setattr(Registration, "_issue_term", issue_term)


@mutant("an epoch is given out before it is on record", "TermsChecker")
def epoch_is_not_recorded(patch: Patch) -> None:
    def issue_term(self, daemon):
        if daemon.role != "agent":
            daemon.term = self._terms[daemon.name] = self._terms.get(daemon.name, 0) + 1

    patch.setattr(Registration, "_issue_term", issue_term)


@mutant("a worker that has been replaced may still push", "TermsChecker", seeds=60, first=4)
def no_fencing(patch: Patch) -> None:
    honest = Dedup.judge

    def judge(self, push):
        slot = self._slots.get(push.slot)
        if slot is not None and push.epoch < slot.epoch:
            slot.epoch, slot.next_seq = push.epoch, push.seq
            return NEW
        return honest(self, push)

    def is_joined(self, peer, slot, epoch):
        """Connections would be told apart otherwise, and fencing not be needed."""
        self._peers[slot] = peer
        return self.dedup.is_current(slot, epoch)

    patch.setattr(Dedup, "judge", judge)
    patch.setattr(ShardProtocol, "_is_joined", is_joined)


# ---------------------------------------------------------------- data


@mutant("a portion that is leased is given to another worker, too", "LeasesChecker")
def leased_twice(patch: Patch) -> None:
    honest = PortionPool.take

    def take(self, slot):
        for key, owner in self._leased.items():
            if owner != slot and sum(key) % 3 == 1:
                return Range(*key, *self.bounds(key[1]))
        return honest(self, slot)

    patch.setattr(PortionPool, "take", take)


@mutant("what a dead worker had of a stream counts as done", "StreamChecker", scenario="streams")
def dead_is_done(patch: Patch) -> None:
    honest = StreamPool.release

    def release(self, slot):
        for key in honest(self, slot):
            self.finish(*key)
        return []

    patch.setattr(StreamPool, "release", release)


@mutant(
    "a portion that is done is leased again when its worker dies",
    "LeasesChecker",
    seeds=30,
    first=1,
)
def done_is_leased_again(patch: Patch) -> None:
    honest = PortionPool.release

    def release(self, slot):
        done = [(epoch, p) for epoch in sorted(self._done) for p in sorted(self._done[epoch])]
        self._returned += done[-1:]
        return honest(self, slot)

    patch.setattr(PortionPool, "release", release)


@mutant("the portions of the dead are forgotten", "LivenessChecker", first=1)
def portions_of_the_dead(patch: Patch) -> None:
    patch.setattr(LeaseScheduler, "gone", lambda self, slot, now: 0)


@mutant("a portion that was given back counts as done", "SamplesChecker", seeds=30, first=4)
def given_back_is_done(patch: Patch) -> None:
    def release(self, slot):
        back = sorted(key for key, owner in self._leased.items() if owner == slot)
        for key in back:
            self.finish(*key)
        return []

    patch.setattr(PortionPool, "release", release)


@mutant("parameters are put into the model under a gradient", "AssertionError")
def place_at_once(patch: Patch) -> None:
    patch.setattr(Training, "_place_arrivals", lambda self: self.reading.place())


# ---------------------------------------------------------------- staleness


@mutant("staleness counts from parameters that came after the gradient", "StalenessChecker")
def too_fresh(patch: Patch) -> None:
    honest = ShardClient.push

    def push(self, *arguments):
        self.base_version = self.version
        return honest(self, *arguments)

    patch.setattr(ShardClient, "push", push)


@mutant("parameters are sent without a copy, while pushes change them", "FetchesChecker")
def no_copy(patch: Patch) -> None:
    patch.setattr(m.Parameters, "borrows", False)


# ---------------------------------------------------------------- fetches of what has changed


@mutant(
    "a shard forgets what the first update behind a worker's version has changed",
    "FetchesChecker", scenario="downpour-topk",
)  # fmt: skip
def history_leaves_one_out(patch: Patch) -> None:
    honest = History.since

    def since(self, base, version, w):
        return honest(self, min(base + 1, version), version, w)

    patch.setattr(History, "since", since)


@mutant(
    "what has changed is put on the model as it is, with the worker's own steps in it",
    "FetchesChecker", scenario="downpour-topk",
)  # fmt: skip
def local_steps_stay(patch: Patch) -> None:
    honest = Basis.place

    def place(self, arrived, model, *, keep):
        own = model.copy()
        honest(self, arrived, model, keep=keep)
        if arrived.where is not None:
            untouched = np.setdiff1d(np.arange(model.size), arrived.where)
            model[untouched] = own[untouched]

    patch.setattr(Basis, "place", place)


@mutant(
    "nobody compares generations, and a server that comes back takes what it has not seen for "
    "nothing", "FetchesChecker", scenario="recovery", seeds=30, first=2,
)  # fmt: skip
def generations_are_not_compared(patch: Patch) -> None:
    honest_message, honest_since = Fetcher._message, History.since

    def message(self, fetched, client, again):
        asked = honest_message(self, fetched, client, again)
        return replace(asked, have_generation=asked.have_generation and client.generation)

    def since(self, base, version, w):
        known = honest_since(self, base, version, w)
        if known is not None:
            return known
        return honest_since(self, version - len(self._updates), version, w)

    patch.setattr(Fetcher, "_message", message)
    patch.setattr(History, "since", since)
    patch.setattr(Basis, "fits", lambda self, arrived: True)


# ---------------------------------------------------------------- liveness and ends


@mutant("what gets no answer is not sent again", "LivenessChecker", "Outcome")
def no_retries(patch: Patch) -> None:
    def due(self, now):
        for item in self._items.values():
            if item.due <= now:
                self._rearm(item, now)
        return []

    patch.setattr(Retries, "due", due)


@mutant("a worker that a shard does not know any more does not join it again", "LivenessChecker")
def unknown_for_good(patch: Patch) -> None:
    patch.setattr(Joining, "on_join_again", lambda self, message, now: None)


@mutant("a barrier waits for workers that have died", "LivenessChecker", scenario="sync")
def barrier_waits_for_the_dead(patch: Patch) -> None:
    honest = Barrier.members

    def members(self, slots):
        return honest(self, slots | self._members)

    patch.setattr(Barrier, "members", members)


@mutant("daemons do not end when they are asked to", "NothingLeft", first=1)
def left_behind(patch: Patch) -> None:
    for role in (Server, Worker):
        patch.setitem(role._FROM_COORDINATOR, m.Shutdown, lambda self, message, now: None)
        patch.setattr(role, "handle", _deaf(role.handle))


def _deaf(honest):
    """A machine that does not end when it is asked to."""

    def handle(self, event, now):
        effects = honest(self, event, now)
        return [e for e in effects if type(e).__name__ != "Exit"]

    return handle


# ---------------------------------------------------------------- recovery


@mutant(
    "the numbers of the pushes are not kept with the shard",
    "LedgerChecker", "StalenessChecker", "LivenessChecker",
    scenario="recovery", seeds=20,
)  # fmt: skip
def dedupe_is_not_saved(patch: Patch) -> None:
    def to_json(self):
        return [[slot, known.epoch, 0] for slot, known in sorted(self._slots.items())]

    patch.setattr(Dedup, "to_json", to_json)


@mutant(
    "the coordinator remembers no portion", "LeasesChecker", "LivenessChecker",
    scenario="recovery", seeds=20,
)  # fmt: skip
def portions_are_not_remembered(patch: Patch) -> None:
    patch.setattr(Persistence, "_changed_portions", lambda self: iter(()))


@mutant(
    "the coordinator remembers no epoch that it has given out", "TermsChecker", "LivenessChecker",
    scenario="recovery", seeds=20,
)  # fmt: skip
def terms_are_not_remembered(patch: Patch) -> None:
    honest = Registration.__init__

    def begin(self, run, past):
        honest(self, run, replace(past, terms={}))

    patch.setattr(Registration, "__init__", begin)


@mutant(
    "a server that comes back has the generation of the one before it", "TermsChecker", "Book",
    "LivenessChecker", scenario="recovery", seeds=20,
)  # fmt: skip
def generation_is_not_raised(patch: Patch) -> None:
    honest = Registration._issue_term

    def issue_term(self, daemon):
        if daemon.role == "server":
            self._terms.pop(daemon.name, None)
        honest(self, daemon)

    patch.setattr(Registration, "_issue_term", issue_term)


@mutant(
    "a sparse update is saved for undo only after it was made", "LedgerChecker",
    "StalenessChecker", scenario="recovery", seeds=20, first=3,
)  # fmt: skip
def saved_too_late(patch: Patch) -> None:
    """Whoever comes after a kill between the two finds half of an update that nobody knows of."""
    honest = Undo.mark
    late: list[tuple[Undo, int, int]] = []

    def mark(self, lo, hi):
        late.append((self, lo, hi))

    def write(self, body, current):
        for undo, lo, hi in late:
            if undo is self._undo:
                honest(undo, lo, hi)
        late[:] = [one for one in late if one[0] is not self._undo]
        commits(self, body, current)

    commits = Mapped._write
    patch.setattr(Undo, "mark", mark)
    patch.setattr(Mapped, "_write", write)


@mutant(
    "what a sparse update has found is put back although the update was committed",
    "AcksChecker", "LedgerChecker", "StalenessChecker", scenario="recovery", seeds=40, first=3,
)  # fmt: skip
def undone_after_its_commit(patch: Patch) -> None:
    honest = Undo.pending
    patch.setattr(Undo, "pending", lambda self, number, size: honest(self, number - 1, size))


@mutant(
    "workers begin although it is not on record that all have come", "FullAtRelease",
    scenario="full-disks", seeds=10, first=3,
)  # fmt: skip
def training_before_the_release_is_on_record(patch: Patch) -> None:
    honest = Lasting.may_leave
    patch.setattr(
        Lasting,
        "may_leave",
        lambda self, message: isinstance(message, m.Lease) or honest(self, message),
    )


@mutant(
    "servers remove what they have kept although it is not on record that the run is over",
    "FullAtEnd", "Outcome", scenario="full-disks", seeds=9, first=6,
)  # fmt: skip
def end_is_not_on_record(patch: Patch) -> None:
    """The next coordinator goes on with the run, and needs it."""
    patch.setattr(RunShutdown, "_unrecorded", lambda self: [])


@mutant(
    "what was made of a push while it came is used although another one came first",
    "LedgerChecker", "StalenessChecker", "AcksChecker",
)  # fmt: skip
def prepared_before_another_update(patch: Patch) -> None:
    patch.setattr(Mapped, "forget_prepared", lambda self: None)


@mutant(
    "what has not come of a push is worked on as if it had", "LedgerChecker", "FetchesChecker",
    "Unusable",
)  # fmt: skip
def worked_on_before_it_came(patch: Patch) -> None:
    honest = Ahead.come
    patch.setattr(Ahead, "come", lambda self, count: honest(self, self._delta.values.size))


@mutant(
    "every update in a journal is made twice when it is read", "LedgerChecker",
    "StalenessChecker", "AcksChecker", scenario="recovery", seeds=40, first=2,
)  # fmt: skip
def redo_is_replayed_twice(patch: Patch) -> None:
    honest = Journaled._deltas_of

    def deltas_of(self, record, updates):
        for delta in honest(self, record, updates):
            yield delta
            yield delta

    patch.setattr(Journaled, "_deltas_of", deltas_of)


# ---------------------------------------------------------------- notes that were lost


@mutant(
    "a worker that has drained for a coordinator that nobody remembers is waited for",
    "LivenessChecker", scenario="full-disks", seeds=10, first=1,
)  # fmt: skip
def drained_for_nobody(patch: Patch) -> None:
    honest = Scaling.on_drained

    def on_drained(self, worker, now):
        if worker.leaving:
            honest(self, worker, now)

    patch.setattr(Scaling, "on_drained", on_drained)


# ---------------------------------------------------------------- the last checkpoint


@mutant(
    "a run that has noted no portion yet saves nothing when it is stopped", "SavedChecker",
    scenario="stops", first=2,
)  # fmt: skip
def nothing_noted_nothing_saved(patch: Patch) -> None:
    honest = Coordinator._save_last

    def save_last(self, now):
        if self.scheduler.steps:
            honest(self, now)

    patch.setattr(Coordinator, "_save_last", save_last)


@mutant(
    "pushes are applied and acknowledged behind the last checkpoint", "SavedChecker",
    scenario="stops", seeds=20, first=3,
)  # fmt: skip
def open_to_the_end(patch: Patch) -> None:
    patch.setattr(ShardProtocol, "close", lambda self, last_checkpoint: None)


@mutant(
    "who takes the place of a server that was closed for the last checkpoint is open",
    "SavedChecker", scenario="stops", seeds=10, first=99,
)  # fmt: skip
def the_next_one_is_open(patch: Patch) -> None:
    honest = ShardProtocol.resume

    def resume(self):
        honest(self)
        self.last_checkpoint = 0

    patch.setattr(ShardProtocol, "resume", resume)


# ---------------------------------------------------------------- what methods may ask for


@mutant("a reply tells of an older clock than its values are of", "AssertionError", scenario="toys")
def stale_clock_in_a_reply(patch: Patch) -> None:
    honest = TableShard._answer_fetch

    def answer(self, peer, fetch):
        clock, self.side.clock = self.side.clock(), lambda: max(0, clock - 2)
        honest(self, peer, fetch)
        del self.side.clock

    patch.setattr(TableShard, "_answer_fetch", answer)


@mutant(
    "a read does not wait for this replica's own pushes", "AssertionError", scenario="toys", first=1
)
def own_pushes_are_not_waited_for(patch: Patch) -> None:
    honest = TableShard._may_answer
    patch.setattr(TableShard, "_may_answer", lambda self, f: honest(self, replace(f, after=0)))


@mutant(
    "a read is answered by an older one that waits for a smaller clock", "AssertionError",
    scenario="toys",
)  # fmt: skip
def an_older_read_answers(patch: Patch) -> None:
    patch.setattr(OneRead, "serves", lambda self, other: True)


@mutant(
    "what is done without a push counts before it is computed", "SamplesChecker", scenario="toys",
    seeds=20, first=2,
)  # fmt: skip
def done_before_the_step(patch: Patch) -> None:
    honest = Portions.done_now

    def done_now(self, steps, but):
        done = honest(self, steps, but)
        if self.current is not None and self.current.next_number:
            done.append(self.current)
        return done

    patch.setattr(Portions, "done_now", done_now)


@mutant(
    "the newest steps are done although they are left out", "AcksChecker", scenario="ways", first=4
)
def steps_left_out_are_done(patch: Patch) -> None:
    honest = Computing._done_without_push
    patch.setattr(Computing, "_done_without_push", lambda self, but, now: honest(self, 0, now))


@mutant(
    "who waits for its push to be settled is told what became of the one before it",
    "LedgerChecker", scenario="ways", first=4,
)  # fmt: skip
def an_older_push_is_told_of(patch: Patch) -> None:
    honest = Writing.poll

    def poll(self, now):
        return (True, self._receipt) if isinstance(self._need, Settle) else honest(self, now)

    patch.setattr(Writing, "poll", poll)


@mutant(
    "who still waits for the model says that it trains", "LivenessChecker",
    scenario="serverless", seeds=1, first=67,
)  # fmt: skip
def trains_without_model(patch: Patch) -> None:
    honest = Training.metrics

    def metrics(self, now):
        return {"step": 0, **honest(self, now)}

    patch.setattr(Training, "metrics", metrics)


@mutant(
    "a replica makes a step of its own while its optimiser is being saved", "AssertionError",
    scenario="serverless", first=30,
)  # fmt: skip
def stepped_while_it_is_saved(patch: Patch) -> None:
    honest = Engines.__init__
    patch.setattr(
        Engines, "__init__", lambda self, context, _: honest(self, context, lambda: False)
    )


@mutant(
    "what another replica has answered is put into the model under a gradient", "AssertionError",
    scenario="serverless", first=1,
)  # fmt: skip
def pulled_under_a_gradient(patch: Patch) -> None:
    honest = Training.advance

    def advance(self, now):
        if self.asking is not None:
            self.asking.hand_out(self.side)
        honest(self, now)

    patch.setattr(Training, "advance", advance)


@mutant(
    "a push to a table beside the parameters is added twice", "TablesChecker", scenario="toys",
    first=1, seeds=6,
)  # fmt: skip
def tables_add_twice(patch: Patch) -> None:
    honest = TableShard._expand

    def expand(self, push):
        delta = honest(self, push)
        return delta._replace(values=delta.values * 2) if self.table else delta

    patch.setattr(TableShard, "_expand", expand)


@mutant(
    "a table beside the parameters is lost with its server", "TablesChecker", "LivenessChecker",
    scenario="toys", first=6,
)  # fmt: skip
def a_table_is_not_committed(patch: Patch) -> None:
    honest = TableShard.commit
    patch.setattr(TableShard, "commit", lambda self: None if self.table else honest(self))


@mutant(
    "who comes to a group at work does not get its model", "GroupChecker", scenario="toys",
    first=3, seeds=1,
)  # fmt: skip
def who_joins_is_not_given_the_model(patch: Patch) -> None:
    honest = group.plan_of
    patch.setattr(group, "plan_of", lambda rows: honest(rows)._replace(joined=0))


@mutant(
    "a group that has lost its model tries for ever", "LivenessChecker", scenario="toys",
    first=238, seeds=1,
)  # fmt: skip
def a_lost_model_is_waited_for(patch: Patch) -> None:
    patch.setattr(Groups, "_lose_model", lambda self, now: None)


@mutant(
    "a dead member is counted in the group", "LivenessChecker", scenario="toys", first=3, seeds=20
)
def the_dead_are_counted(patch: Patch) -> None:
    def wanted(self):
        return tuple((d.index, d.term) for d in self.run.members.of_role("worker"))

    patch.setattr(Groups, "_wanted", wanted)


@mutant(
    "a push is acknowledged as buffered, and lost with its server", "BufferedChecker",
    "LivenessChecker", scenario="toys", first=4, seeds=60,
)  # fmt: skip
def what_is_buffered_is_not_committed(patch: Patch) -> None:
    honest = TableShard.commit

    def commit(self):
        if not self.shard.optimizer.counters.get("buffered"):
            honest(self)

    patch.setattr(TableShard, "commit", commit)


@mutant(
    "a push is acknowledged as buffered, and dropped", "BufferedChecker", scenario="toys", first=4,
    seeds=6,
)  # fmt: skip
def what_is_buffered_is_dropped(patch: Patch) -> None:
    honest = TableShard._take

    def take(self, push):
        if push.seq % 3 or "buffered" not in self.shard.optimizer.counters:
            honest(self, push)
            return
        self.dedup.take(push)
        self._settle([Outcome(push.slot, push.epoch, push.seq, BUFFERED)])

    patch.setattr(TableShard, "_take", take)


@mutant(
    "the clock of the lead begins anew with its coordinator", "LeadChecker", scenario="toys",
    first=25,
)  # fmt: skip
def the_lead_forgets_its_clock(patch: Patch) -> None:
    def restore_lead(self, lead):
        _, state, self._journal = lead
        self.side.resume(state)

    patch.setattr(LeaseScheduler, "restore_lead", restore_lead)


@mutant(
    "an answer of a process that was replaced is used", "AnswersChecker", scenario="toys",
    first=22, seeds=10,
)  # fmt: skip
def a_replaced_replica_answers(patch: Patch) -> None:
    def on_answer(self, peer, answer, now):
        for number, question in list(self._open.items()):
            if question.slot == answer.slot and not answer.error:
                self._outstanding.drop(("ask", number))
                self.newest = answer.payload.arrays
                self._open.pop(number).then(self.newest)

    patch.setattr(Asking, "on_answer", on_answer)
    patch.setattr(Asking, "_has_left", lambda self, slot, epoch: False)


# ---------------------------------------------------------------- one decider for all shards


@mutant(
    "each shard decides by its own arrivals", "QuorumChecker", scenario="toys", first=5, seeds=1
)
def quorum_per_shard(patch: Patch) -> None:
    honest = Chosen._hold

    def hold(self, held):
        outcomes = honest(self, held)
        clock = self.shard.version
        here = [(slot, epoch) for at, slot, epoch in self._held if at == clock]
        if len(here) < 2:
            return outcomes
        return [*outcomes, *self.decided(Decision(clock, frozenset(here[:2]), frozenset()))]

    patch.setattr(Chosen, "_hold", hold)
    patch.setattr(AsksLead, "on_decided", lambda self, message: None)


@mutant(
    "the next step is decided while a shard has not made this one", "QuorumChecker",
    scenario="toys", first=5, seeds=1,
)  # fmt: skip
def the_next_step_is_decided_too_early(patch: Patch) -> None:
    patch.setattr(Quorums, "_is_under_way", lambda self, known: False)


@mutant(
    "a lead is told that it has waited although it has not", "QuorumChecker", scenario="toys",
    first=11, seeds=1,
)  # fmt: skip
def the_lead_does_not_wait(patch: Patch) -> None:
    honest = Quorums._decide
    patch.setattr(Quorums, "_decide", lambda self, now, least_s: honest(self, now, 3600.0))


@mutant(
    "a decision is forgotten with its coordinator", "LivenessChecker", "QuorumChecker",
    scenario="toys", first=35, seeds=1,
)  # fmt: skip
def a_decision_is_forgotten(patch: Patch) -> None:
    patch.setattr(Quorums, "recall", lambda self, memory, now: None)


@mutant(
    "the lost push of a dead worker is waited for", "LivenessChecker", scenario="toys", first=5,
    seeds=1,
)  # fmt: skip
def lost_pushes_of_the_dead_are_waited_for(patch: Patch) -> None:
    def missing(self, decision):
        here = {(slot, epoch) for clock, slot, epoch in self._held if clock == decision.clock}
        return decision.used - here

    patch.setattr(Chosen, "_missing", missing)


@mutant(
    "the norm that some shards have clipped by is forgotten with its coordinator", "NormChecker",
    scenario="sync-recovery", first=43, seeds=1,
)  # fmt: skip
def a_norm_is_forgotten(patch: Patch) -> None:
    patch.setattr(Norms, "recall", lambda self, memory, now: None)
