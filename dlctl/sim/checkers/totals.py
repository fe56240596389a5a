"""The samples that the shards count are those of the run: none is lost, and none counts twice."""

from __future__ import annotations

from dlctl.sim.checkers.base import Checker
from dlctl.sim.checkers.book import Book
from dlctl.sim.checkers.ledger import FAULTLESS
from dlctl.sim.world import World


class TotalsChecker(Checker):
    """At the end of a finished run in which no worker has died, each shard has trained `epochs`
    times the dataset, but for the pushes that it has dropped. A batch that was begun and given up
    counts only once it is in a push.
    """

    def __init__(self, book: Book, epochs: int) -> None:
        self.book = book
        self.epochs = epochs

    def at_end(self, world: World) -> None:
        is_finished = world.store.run.get("state") == FAULTLESS
        if not is_finished or any(worker.status != 0 for worker in self.book.who):
            return  # The portions of one that has died are computed once more.
        wanted = self.epochs * self.book.objective.samples
        for shard, server in sorted(self.book.servers.items()):
            trained = server.machine.serving.shard.samples  # type: ignore[attr-defined]
            dropped = sum(self.book.samples[k] for k in self.book.dropped if k.shard == shard)
            if trained + dropped != wanted:
                counts = f"{trained} samples and dropped {dropped} of {wanted}"
                raise self.broken(f"server-{shard} has trained {counts}")
