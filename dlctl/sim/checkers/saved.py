"""A run that has ended in an orderly way leaves only its last checkpoint, which is complete."""

from __future__ import annotations

from dlctl.sim.checkers.base import Checker
from dlctl.sim.checkers.book import Book
from dlctl.sim.world import World

IN_ORDER = ("finished", "stopped")
"""Final states of a run whose servers remove their persisted state."""


class SavedChecker(Checker):
    """After an orderly end of a run, all acknowledged pushes are in the newest checkpoint."""

    def __init__(self, book: Book) -> None:
        self.book = book

    def at_end(self, world: World) -> None:
        store = world.store
        if store.run.get("state") not in IN_ORDER or not self.book.acknowledged:
            return
        newest = store.newest()
        if not newest:
            count = len(self.book.acknowledged)
            raise self.broken(f"{count} pushes are acknowledged, and there is no checkpoint")
        shards = self.book.objective.by_shard(
            store.read_slice(newest, "w", 0, world.weights().size)
        )
        for key in sorted(self.book.acknowledged):
            if not shards[key.shard][self.book.cells[key]].all():
                raise self.broken(f"{key} is acknowledged and not in {newest}")
