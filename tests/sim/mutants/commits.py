"""Bugs of commits that are under way: what leaves a server too early, and what is lost with it."""

from __future__ import annotations

from planting import Patch, mutant

from dlctl.roles.server import commits
from dlctl.roles.server.commits import Commits
from dlctl.shards import log
from dlctl.shards.journaled import Journaled
from dlctl.sim import states
from dlctl.sim.checkers import AcksChecker, DurableChecker, StalenessChecker
from dlctl.wire import messages as m
from dlctl.wire.machine import Send


def passes(patch: Patch, is_it) -> None:
    """Messages of this kind leave before the commits that they follow."""
    honest = commits._has_to_wait

    def has_to_wait(effect):
        return honest(effect) and not (isinstance(effect, Send) and is_it(effect.message))

    patch.setattr(commits, "_has_to_wait", has_to_wait)


@mutant("a push is acknowledged while its commit is under way", "AcksChecker", "DurableChecker",
    scenario="commits",
)  # fmt: skip
def acks_do_not_wait(patch: Patch) -> None:
    passes(patch, lambda message: isinstance(message, m.Ack))


@mutant(
    "a push that comes again while its commit is under way is acknowledged at once",
    "AcksChecker", "DurableChecker", scenario="commits",
)  # fmt: skip
def duplicates_do_not_wait(patch: Patch) -> None:
    passes(patch, lambda message: isinstance(message, m.Ack) and message.outcome == m.DUPLICATE)


@mutant(
    "a worker reads what a power loss undoes", "DurableChecker", "StalenessChecker",
    scenario="commits",
)  # fmt: skip
def reads_do_not_wait(patch: Patch) -> None:
    passes(patch, lambda message: isinstance(message, m.Parameters | m.SparseParameters))


@mutant("who joins again is told of pushes that a power loss undoes", "DurableChecker",
    scenario="commits", seeds=30,
)  # fmt: skip
def joins_do_not_wait(patch: Patch) -> None:
    passes(patch, lambda message: isinstance(message, m.Joined))


@mutant(
    "the coordinator hears of a version that a power loss undoes", "DurableChecker",
    scenario="commits", seeds=30,
)  # fmt: skip
def reports_do_not_wait(patch: Patch) -> None:
    passes(patch, lambda message: isinstance(message, m.Report))


@mutant(
    "what has been read for an answer changes while the answer waits", "FetchesChecker",
    scenario="commits",
)  # fmt: skip
def waiting_answers_change(patch: Patch) -> None:
    patch.setattr(commits, "_with_own_arrays", lambda message: message)


@mutant(
    "an ack leaves with the commit before its own", "AcksChecker", "DurableChecker",
    scenario="commits",
)  # fmt: skip
def acks_are_one_commit_ahead(patch: Patch) -> None:
    honest = Commits.committed
    patch.setattr(Commits, "committed", lambda self, n: honest(self, min(n + 1, self._passed)))


@mutant(
    "of two commits under way the later one is written, and both are confirmed", "Unusable",
    "AcksChecker", "DurableChecker", scenario="commits",
)  # fmt: skip
def commits_are_out_of_order(patch: Patch) -> None:
    honest = log.perform_first

    def perform_first(writes):
        return honest(writes) if len(writes) < 2 else 1 + honest(writes[1:2])

    plant_writer(patch, perform_first)


@mutant(
    "one sync of several commits covers the first of them only", "AcksChecker", "DurableChecker",
    scenario="commits",
)  # fmt: skip
def a_sync_covers_the_first_only(patch: Patch) -> None:
    honest = log.perform_first

    def perform_first(writes):
        honest(writes[:1])
        return len(writes)

    plant_writer(patch, perform_first)


@mutant(
    "a commit that is lost with its server counts as durable", "LedgerChecker", "LivenessChecker",
    scenario="commits", seeds=20,
)  # fmt: skip
def lost_commits_are_taken_for_durable(patch: Patch) -> None:
    """What becomes of commits if nobody looks at the moment of an ack: workers that were told of
    them too early do not push again, and the next server does not have them.
    """
    for checker in (AcksChecker, DurableChecker, StalenessChecker):
        patch.setattr(checker, "on_effect", lambda self, process, effect: None)
    acks_do_not_wait(patch)


@mutant(
    "a journal is started over while its last base is under way", "BasesChecker",
    scenario="commits",
)  # fmt: skip
def bases_pile_up(patch: Patch) -> None:
    honest = Journaled.commit
    patch.setattr(Journaled, "commit", lambda self, state, **_: honest(self, state))


@mutant("no journal is ever started over", "BasesChecker", scenario="commits")
def journals_grow_without_end(patch: Patch) -> None:
    patch.setattr(Journaled, "_journal_bytes_max", lambda self: 10**9)


def plant_writer(patch: Patch, perform_first) -> None:
    patch.setattr(log, "perform_first", perform_first)
    patch.setattr(states, "perform_first", perform_first)
