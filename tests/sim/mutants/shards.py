"""Bugs of a shard's durability."""

from __future__ import annotations

from planting import Patch, mutant

from dlctl.shards.ahead import Ahead
from dlctl.shards.history import History
from dlctl.shards.journaled import Journaled
from dlctl.shards.mapped import Mapped
from dlctl.shards.undo import Undo


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
