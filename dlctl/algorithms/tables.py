"""What a push means to a table, by the rule that the method declares for it."""

from __future__ import annotations

from typing import Any

from dlctl.algorithms.base import Method, ShardSide, Table
from dlctl.algorithms.downpour import Server
from dlctl.algorithms.sync import Barrier
from dlctl.optim.base import Optimizer
from dlctl.optim.plain import Add, Set
from dlctl.shards.base import Shard


def optimizer_of(table: Table, method: Method, options: Any, parameters: Optimizer) -> Optimizer:
    """The rule by which a table's shard is updated; parameters: the servers' optimiser."""
    if table.rule == "optimizer":
        assert method.shard is not None, "a method without servers has no tables"
        return method.shard.optimizer(options, parameters)
    return Add() if table.rule == "add" else Set()


def side_of(table: Table, method: Method, options: Any, shard: Shard) -> ShardSide:
    """The shard side of a table: the method's for the parameters, else what the rule says.

    "add" and "set" apply at once. "mean" is a barrier: each clock takes the place of the one before
    when all members have pushed for it.
    """
    if table.rule == "optimizer":
        assert method.shard is not None, "a method without servers has no tables"
        return method.shard(options, shard)
    return (Barrier if table.rule == "mean" else Server)(options, shard)
