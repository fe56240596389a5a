"""How a table handles a push, by the rule that the method declares for it."""

from __future__ import annotations

from typing import Any

from dlctl.algorithms.barrier import Barrier
from dlctl.algorithms.base import Method, PushOutcome, ShardSide, Table
from dlctl.algorithms.methods.downpour import Server
from dlctl.algorithms.shapes import check_names
from dlctl.compress.base import Delta
from dlctl.optim.base import Optimizer
from dlctl.optim.plain import Accrue, Add, Set
from dlctl.shards.base import Shard
from dlctl.wire import messages
from dlctl.wire.messages import APPLIED, LATE, Json


def optimizer_of(
    table: Table, method: Method, options: Any, parameters: Optimizer, workers: int
) -> Optimizer:
    """The rule by which a table's shard is updated; parameters: the servers' optimiser."""
    match table.rule:
        case "optimizer":
            assert method.shard is not None, "shapes.faults_of has seen to it"
            return method.shard.optimizer(options, parameters, workers)
        case "add":
            return Add()
        case "parts":
            return Accrue()
        case _:
            return Set()


def side_of(table: Table, method: Method, options: Any, shard: Shard) -> ShardSide:
    """The shard side of a table: the method's for the parameters, else that of the rule.

    "add" and "set" apply at once. "mean" is a barrier: each clock replaces the previous one when
    all members have pushed for it.
    """
    match table.rule:
        case "optimizer":
            assert method.shard is not None, "shapes.faults_of has seen to it"
            side = method.shard.of(options)(options, shard)
            side.mean = method.mean(side)
            check_names(side)
            return side
        case "mean":
            return Barrier(options, shard)
        case "parts":
            return Parts(options, shard)
        case "lead":
            return Led(options, shard)
        case _:
            return Server(options, shard)


PASSED_OVER_MAX = 1000
"""Batches in a row without a push to a shard, as all their gradients are discarded: a clock that is
further ahead is an error, and would make all later pushes late."""
PARTS_MAX = 2**17
"""Parts of one clock: every commit contains which of them have arrived."""


class Led(ShardSide):
    """A table that only the coordinator changes."""

    takes_pushes = False

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        raise AssertionError("the table refuses all pushes")


class Parts(ShardSide):
    """The sum of the newest clock's parts, each of them once, from any worker.

    A worker may die when some shards have its push; then another worker pushes that part to all.
    """

    def __init__(self, options: Any, shard: Shard) -> None:
        super().__init__(options, shard)
        self._clock = -1
        self._parts = 0
        """Bit p: part p of this clock is in the sum."""

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        if push.portion >= PARTS_MAX:
            return self.left_out(push, f"it is part {push.portion}; there are {PARTS_MAX} at most")
        if push.clock > self._clock + PASSED_OVER_MAX:
            return self.left_out(push, f"it is of batch {push.clock}, the newest is {self._clock}")
        is_newer, part = push.clock > self._clock, 1 << push.portion
        kind = LATE
        if is_newer or (push.clock == self._clock and not self._parts & part):
            self._clock, self._parts = push.clock, part if is_newer else self._parts | part
            self.shard.lr = 0.0 if is_newer else 1.0
            self.shard.apply(Delta(delta.dense(self.shard.size)))
            kind = APPLIED
        return [push.outcome(kind)]

    def state(self) -> Json:
        return {"clock": self._clock, "parts": f"{self._parts:x}"}

    def resume(self, state: Json) -> None:
        self._clock, self._parts = state["clock"], int(state["parts"], 16)

    def restore(self, state: Json) -> None:
        """A portion not done in the checkpoint is pushed again, and is already in the sum."""
        self.resume(state)
