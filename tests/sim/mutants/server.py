"""Bugs of the server: duplicates, order, commits, acknowledgements."""

from __future__ import annotations

from dataclasses import replace

from planting import Patch, mutant

from dlctl.roles.server.dedup import NEW, Dedup
from dlctl.roles.server.shard_protocol import ShardProtocol
from dlctl.roles.server.table_shard import TableShard
from dlctl.roles.server.vectors import OPS_MAX, ShardVectors
from dlctl.shards.base import Shard
from dlctl.wire import codec
from dlctl.wire.messages import APPLIED, BUFFERED, DUPLICATE


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

    def commit(self, **order):
        if self.shard.version % 4 != 3:
            honest(self, **order)

    patch.setattr(TableShard, "commit", commit)


@mutant(
    "an operation of the lead is made twice", "SameResult", scenario="sandblaster", first=29,
)  # fmt: skip
def operation_is_made_twice(patch: Patch) -> None:
    honest = ShardVectors.run

    def run(self, message):
        for table in self._tables.values():
            if table.newest_op // OPS_MAX == message.number:
                table.newest_op = -1
        return honest(self, message)

    patch.setattr(ShardVectors, "run", run)


@mutant("a worker that has been replaced may still push", "TermsChecker", seeds=60, first=4)
def no_fencing(patch: Patch) -> None:
    honest = Dedup.judge

    def judge(self, push):
        slot = self._slots.get(push.slot)
        if slot is not None and push.term < slot.term:
            slot.term, slot.next_seq = push.term, push.seq
            return NEW
        return honest(self, push)

    def is_joined(self, peer, slot, term):
        """Connections would be told apart otherwise, and fencing not be needed."""
        self._peers[slot] = peer
        return self.parameters.dedup.is_current(slot, term)

    patch.setattr(Dedup, "judge", judge)
    patch.setattr(ShardProtocol, "_is_joined", is_joined)


@mutant(
    "the numbers of the pushes are not kept with the shard",
    "LedgerChecker", "StalenessChecker", "LivenessChecker",
    scenario="recovery", seeds=20,
)  # fmt: skip
def dedupe_is_not_saved(patch: Patch) -> None:
    def to_json(self):
        return [[slot, known.term, 0] for slot, known in sorted(self._slots.items())]

    patch.setattr(Dedup, "to_json", to_json)


@mutant(
    "pushes are applied and acknowledged behind the last checkpoint", "SavedChecker",
    scenario="stops", seeds=20, first=3,
)  # fmt: skip
def open_to_the_end(patch: Patch) -> None:
    patch.setattr(ShardProtocol, "close", lambda self, last_checkpoint: None)


@mutant(
    "who takes the place of a server that was closed for the last checkpoint is open",
    "SavedChecker", scenario="stops", seeds=10, first=210,
)  # fmt: skip
def the_next_one_is_open(patch: Patch) -> None:
    honest = ShardProtocol.resume

    def resume(self):
        honest(self)
        self.last_checkpoint = 0

    patch.setattr(ShardProtocol, "resume", resume)


@mutant("a reply tells of an older clock than its values are of", "AssertionError", scenario="toys")
def stale_clock_in_a_reply(patch: Patch) -> None:
    honest = TableShard._answer_fetch

    def answer(self, peer, fetch):
        clock, self.side.clock = self.side.clock(), lambda: max(0, clock - 2)
        honest(self, peer, fetch)
        del self.side.clock

    patch.setattr(TableShard, "_answer_fetch", answer)


@mutant(
    "a read does not wait for this replica's own pushes",
    "AssertionError",
    scenario="toys",
    first=166,
)
def own_pushes_are_not_waited_for(patch: Patch) -> None:
    honest = TableShard._may_answer
    patch.setattr(TableShard, "_may_answer", lambda self, f: honest(self, replace(f, after=0)))


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

    def commit(self, **order):
        if not self.table:
            honest(self, **order)

    patch.setattr(TableShard, "commit", commit)


@mutant(
    "a push is acknowledged as buffered, and lost with its server", "BufferedChecker",
    "LivenessChecker", scenario="toys", first=39, seeds=10,
)  # fmt: skip
def what_is_buffered_is_not_committed(patch: Patch) -> None:
    honest = TableShard.commit

    def commit(self, **order):
        if not self.shard.optimizer.counters.get("buffered"):
            honest(self, **order)

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
        self.settle([push.outcome(BUFFERED)])

    patch.setattr(TableShard, "_take", take)


@mutant("a number is as large as it likes", "Unusable", scenario="stolen-keys", first=4)
def numbers_without_limits(patch: Patch) -> None:
    def apply(self, delta, samples=0, *args, **options):
        total = self.samples + samples
        honest(self, delta, samples, *args, **options)
        self.samples = total

    honest, known = Shard.apply, codec.limits_of
    patch.setattr(Shard, "apply", apply)
    patch.setattr(TableShard, "_check_samples", lambda self, push: None)
    patch.setattr(codec, "limits_of", lambda hint: (of := known(hint)) and replace(of, most=2**62))
    patch.setattr(codec, "_CHECKERS", {})
