"""Downpour whose epochs end without the slowest. Chilimbi et al., "Project Adam: Building an
Efficient and Scalable Deep Learning Training System", OSDI 2014.

Every replica has its share of an epoch, and takes no work of others. When f = `fraction` of all
replicas are done with theirs, the epoch is over for all: portions not begun are dropped. The paper
has f = 0.75. Replicas and servers are those of `downpour`.

    N replicas live, an epoch has P portions: each has P / N of them (the first P mod N one more)
    ceil(f N) replicas have done their shares:  drop the rest; the next epoch begins

- This sentence of the paper was not available: it is known from reading notes. Numbers of the paper
  are not repeated here.
- Shares are numbers of portions, and no fixed images: portions are leased in the order of the
  epoch's own shuffle, so what is dropped is a different part of the data in every epoch.
- A leased portion is computed to its end, even if its epoch is over meanwhile. One that is released
  after that, because its worker has died, is dropped.
- The shares are those of the living replicas: after a death the others' shares grow, until the
  replica is replaced. Its completed portions count for its replacement.
- Dropped portions count as done for `stop` and evaluations, but in no number of samples. A schedule
  depends on computed samples, so it does not reach its end.
- In the warm start of `downpour` there are no shares.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Le

from dlctl.algorithms.base import Method
from dlctl.algorithms.methods import downpour
from dlctl.wire.messages import Json


@dataclass(slots=True, kw_only=True)
class Options(downpour.Options):
    fraction: Annotated[float, Gt(0), Le(1)] = 0.75
    """Fraction of the replicas that have to complete their shares of an epoch before it ends for
    all; 1: all of them."""


class EpochCutReplica(downpour.WarmStart):
    cuts_epochs = True
    options: Options

    def __post_init__(self) -> None:
        self._done: Counter[int] = Counter()
        """Slot -> completed portions of this data epoch."""

    def may_lease(self, slot: int, first_slot: int) -> str:
        if (why := super().may_lease(slot, first_slot)) or self._is_warm_start():
            return why
        under_way = self.epoch.under_way.get(slot, 0)
        has_share = self._done[slot] + under_way >= self._share(slot)
        if not has_share and self.epoch.left:
            return ""
        if not self.epoch.portions:
            return ""  # The run is at its end, and the worker is notified of that.
        missing = self._enough() - sum(map(self._is_done, self.members))
        return f"data epoch {self.data_epoch} ends when {max(1, missing)} more are done with it"

    def cut_epoch(self) -> bool:
        if self._is_warm_start() or not self.members:
            return False
        if sum(map(self._is_done, self.members)) < self._enough():
            return False
        self._done.clear()
        return True

    def portion_done(self, slot: int, steps: int, samples: int, data_epoch: int) -> None:
        if data_epoch == self.data_epoch:
            self._done[slot] += 1

    def _is_warm_start(self) -> bool:
        return self.steps_done < self.options.warmstart_steps

    def _enough(self) -> int:
        return math.ceil(self.options.fraction * len(self.members))

    def _share(self, slot: int) -> int:
        each, rest = divmod(self.epoch.portions, max(1, len(self.members)))
        return each + (sum(other < slot for other in self.members) < rest)

    def _is_done(self, slot: int) -> bool:
        """Whether a slot has completed its share, or all that is left."""
        rests = not self.epoch.left and not self.epoch.under_way.get(slot)
        return rests or self._done[slot] >= self._share(slot)

    def state(self) -> Json:
        return {"epoch": self.data_epoch, "done": sorted(map(list, self._done.items()))}

    def resume(self, state: Json) -> None:
        self.data_epoch, self._done = state["epoch"], Counter(dict(state["done"]))

    def figures(self) -> Json:
        return {"data_epoch": self.data_epoch}


EPOCH_CUT = Method(
    Options=Options,
    replica=downpour.Replica,
    shard=downpour.Server,
    lead=EpochCutReplica,
    inner=downpour.DOWNPOUR.inner,
)
