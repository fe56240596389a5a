"""toy-quorum: synchronous SGD with backup workers, in small (Chen et al., 2016).

    replica, at clock t:  push the gradient for t; what became of it is the same on all shards
    lead:                 all members but `backups` have come, and `rest_s` are over: these count
    shard:                w_{t+1} = w_t - eta * mean of the chosen gradients

It guards the one decider of all shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from dlctl.algorithms import barrier
from dlctl.algorithms.base import Lead, Method, Needs, Process, PushOutcome, ReplicaSide
from dlctl.algorithms.holding import HeldPush, JointStep
from dlctl.algorithms.needs import Receipt, Write
from dlctl.algorithms.quorum import Chosen
from dlctl.algorithms.stepwise import accrue
from dlctl.shards import base
from dlctl.wire.messages import APPLIED, DUPLICATE


@dataclass(slots=True, kw_only=True)
class Options:
    backups: Annotated[int, Ge(0)] = 0
    """Workers that nobody waits for."""
    rest_s: Annotated[float, Ge(0)] = 0.0
    """Seconds that every clock takes at least, whoever has come."""


class Replica(ReplicaSide):
    def changes_parameters(self) -> bool:
        return False

    def run(self) -> Needs:
        clock = yield from barrier.join_chosen()
        while True:
            samples = yield from accrue(self)
            vector = self.residual if samples else None
            receipt: Receipt = yield Write(vector=vector, samples=samples, clock=clock, wait=True)
            kinds = {APPLIED if kind == DUPLICATE else kind for kind in receipt.outcomes.values()}
            assert len(kinds) == 1, f"push of clock {clock}: {receipt.outcomes}"
            clock = yield from barrier.next_chosen(clock)


class Shard(Chosen):
    def __init__(self, options: Options, shard: base.Shard) -> None:
        super().__init__(options, shard)
        self.steps: Noting = Noting(self, self.shared_norm)

    @property
    def newest_step(self) -> tuple[int, frozenset[Process]] | None:
        """A checker compares the shards."""
        return self.steps.newest


class Noting(JointStep):
    newest: tuple[int, frozenset[Process]] | None = None
    """The clock of the newest step, and whose pushes it was made with."""

    def make(self, held: Sequence[HeldPush]) -> list[PushOutcome]:
        used = frozenset((h.push.slot, h.push.term) for h in held)
        self.newest = self.side.shard.version, used
        return super().make(held)


class Counting(Lead):
    chooses = True

    def quorum(
        self, clock: int, came: Mapping[int, int], members: frozenset[int], waited_s: float
    ) -> frozenset[int] | float | None:
        """Called whenever another one comes: the first of them, or if several come at once the
        lowest slots.
        """
        if waited_s < self.options.rest_s:
            return float(self.options.rest_s)
        enough = max(1, len(members) - self.options.backups)
        return frozenset(sorted(came)[:enough]) if len(came) >= enough else None


QUORUM = Method(Options=Options, replica=Replica, shard=Shard, lead=Counting)
