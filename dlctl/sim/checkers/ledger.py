"""Exactly once: nothing that was acknowledged is lost, and nothing is applied twice."""

from __future__ import annotations

from dlctl.sim.checkers.base import Checker
from dlctl.sim.checkers.book import Book, PushKey
from dlctl.sim.process import Process
from dlctl.sim.world import World
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Send

FAULTLESS = "finished"
"""The state of a run whose workers' residuals are checked: all of them had time to leave."""


class LedgerChecker(Checker):
    """The final account: every gradient adds 1 to its own cell (`objectives.Ledger`).

    With `averages` (a barrier takes the mean of its pushes) a cell has a part of 1; then it must
    keep the value that it had when its push was acknowledged. With `shares`, if each push is of one
    gradient, the cells of one step share 1 between them.
    """

    def __init__(self, book: Book, *, averages: bool = False, shares: bool = False) -> None:
        self.book = book
        self.averages = averages
        self.shares = shares
        self.lost = self.twice = 0
        self._first: dict[PushKey, float] = {}
        """The value of a push's first cell when it was first acknowledged."""

    def on_effect(self, process: Process, effect: Effect) -> None:
        if (
            not self.averages
            or not isinstance(effect, Send)
            or not isinstance(effect.message, m.Ack)
        ):
            return
        key = self.book.key(process, effect.peer, effect.message)
        if key in self.book.acknowledged and len(self.book.cells[key]):
            w = process.machine.serving.shard.w  # type: ignore[attr-defined]
            self._first.setdefault(key, float(w[self.book.cells[key][0]]))

    def at_end(self, world: World) -> None:
        shards = self.book.objective.by_shard(world.weights())
        self.lost = sum(
            int((shards[key.shard][self.book.cells[key]] == 0).sum())
            for key in sorted(self.book.acknowledged)
        )
        self.twice = self._changed(shards) if self.averages else int((shards > 1).sum())
        if (self.lost, self.twice) != (0, 0):
            raise self.broken(f"{self.lost} lost, {self.twice} twice")
        if self.shares:
            self._check_sums(shards)
        if world.store.run.get("state") == FAULTLESS:
            self._check_portions(shards)

    def _changed(self, shards: m.Array) -> int:
        return sum(
            shards[key.shard][self.book.cells[key][0]] != value
            for key, value in self._first.items()
        )

    def _check_sums(self, shards: m.Array) -> None:
        for shard, sums in enumerate(shards.sum(axis=1)):
            if abs(sums - round(float(sums))) > 1e-3:
                raise self.broken(f"the steps of server-{shard} add up to {sums:.4f}")

    def _check_portions(self, shards: m.Array) -> None:
        """Portions reported done are in the servers, or still in the worker's residual."""
        for done in self.book.done:
            if done.process.status != 0:
                continue  # If a worker dies, its residual is lost.
            for shard, weights in enumerate(shards):
                if missing := self.book.missing(done, shard, weights):
                    raise self.broken(
                        f"{done.message} was done by {done.process}, but its gradients {missing} "
                        f"are neither in server-{shard} nor in its residual"
                    )
