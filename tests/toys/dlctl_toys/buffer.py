"""toy-buffer: pushes are collected on the shard, and every fourth one makes a step of their mean.

It guards pushes that are acknowledged and come into the values later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlctl.algorithms.base import Method, PushOutcome, ShardSide
from dlctl.algorithms.methods.downpour import Options as DownpourOptions
from dlctl.algorithms.methods.downpour import Replica
from dlctl.compress.base import Delta
from dlctl.optim.base import Optimizer
from dlctl.optim.buffered import Buffered
from dlctl.wire import messages
from dlctl.wire.messages import APPLIED, BUFFERED

CAPACITY = 4


@dataclass(slots=True, kw_only=True)
class Options(DownpourOptions):
    pass


class Collecting(ShardSide):
    @classmethod
    def optimizer(cls, options: Any, optimizer: Optimizer, workers: int) -> Optimizer:
        return Buffered(optimizer, CAPACITY)

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        staleness = max(0, self.shard.version - push.base_version)
        self.shard.apply(delta, push.samples)
        is_buffered = self.shard.optimizer.counters["buffered"] > 0
        kind = BUFFERED if is_buffered else APPLIED
        return [push.outcome(kind, staleness)]


BUFFER = Method(Options=Options, replica=Replica, shard=Collecting)
