"""toy-buffer: pushes are collected on the shard; every so many of them make a step of their mean.

It guards pushes that are acknowledged and come into the values later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge

from dlctl.algorithms.base import Method, PushOutcome, ShardSide
from dlctl.algorithms.methods.downpour import Options as DownpourOptions
from dlctl.algorithms.methods.downpour import Replica
from dlctl.compress.base import Delta
from dlctl.job.settings import Live
from dlctl.optim.base import Optimizer
from dlctl.optim.buffered import BUFFERED as COUNT
from dlctl.optim.buffered import CAPACITY, Buffered
from dlctl.wire import messages
from dlctl.wire.messages import APPLIED, BUFFERED


@dataclass(slots=True, kw_only=True)
class Options(DownpourOptions):
    capacity: Live[Annotated[int, Ge(1)]] = 4
    """Pushes of one step."""


class Collecting(ShardSide):
    live: ClassVar[tuple[str, ...]] = ("capacity",)
    options: Options

    @classmethod
    def optimizer(cls, options: Options, optimizer: Optimizer, workers: int) -> Optimizer:
        return Buffered(optimizer, options.capacity)

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        staleness = max(0, self.shard.version - push.base_version)
        self.shard.apply(delta, push.samples, counters={CAPACITY: self.options.capacity})
        is_buffered = self.shard.optimizer.counters[COUNT] > 0
        kind = BUFFERED if is_buffered else APPLIED
        return [push.outcome(kind, staleness)]


BUFFER = Method(Options=Options, replica=Replica, shard=Collecting)
