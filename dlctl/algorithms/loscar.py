"""LOSCAR-SGD: local SGD that averages a random part of the parameters each round, while training
continues (arXiv 2605.20866).

Every round has a mask S, which all replicas derive from the number of the round. Parameters in S
are averaged; the others stay local to each replica, until a later mask contains them.

    round t:  replica i:  H steps, to y_i;  push (x - y_i) on S_t          # x: from the servers
              shard:      x = mean_i y_i on S_t
              replica i:  some steps later, at z_i:   x_i = x + (z_i - y_i) on S_t,   z_i elsewhere

So training does not wait for the network, and a round costs `density` of the bytes of local SGD's.

This file was derived from a summary of the method and not from the paper's text. What is ours:

- replicas have equal weights, those without data included: these are at x;
- a replica that runs out of data pushes its whole difference to the servers' parameters, at its
  weight, so that the final model is the mean of all replicas;
- positions are sent with the values, in about a byte each; the servers could derive them, too.

Rounds, members and deaths are those of `local-sgd`. Unpushed steps of a dead replica are lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Gt, Le

from dlctl import messages
from dlctl.algorithms import local_sgd, sync
from dlctl.algorithms.base import Method, PushKind, Shape, Start
from dlctl.algorithms.sparse import SparseSide, even_shares
from dlctl.config import Choice
from dlctl.messages import Array
from dlctl.vector import Vector, copy_into, copy_of, indices_like, is_finite

MASKS = 0x105CA4
"""Seeds the masks, with the number of the round."""


@dataclass(slots=True, kw_only=True)
class Options(local_sgd.Options):
    density: Annotated[float, Gt(0), Le(1)] = 0.01
    """Fraction of the parameters that a round averages."""
    overlap: bool = True
    """Continue with the next round while the mean of this one is in flight; false: wait."""


class Replica(local_sgd.Replica):
    options: Options

    @classmethod
    def one_push(cls, options: Any) -> PushKind:
        return PushKind(options.local_steps, is_way=True, is_all=False)

    def begin(self, start: Start) -> None:
        super().begin(start)
        self._base: Vector = copy_of(self.parameters)
        self._has_model = self._is_astray = False

    def state(self) -> dict[str, Vector]:
        return {"residual": self.residual, "own": self.parameters, "base": self._base}

    def restore(self, state: Mapping[str, Array]) -> None:
        super().restore(state)
        if {"own", "base"} <= state.keys() and state["own"].size == len(self.parameters):
            copy_into(self.parameters, state["own"])
            copy_into(self._base, state["base"])
            self._has_model = True

    def _accrue(self) -> sync.Accrues:
        self._is_astray = False
        samples = yield from super()._accrue()
        self._is_astray = not self._is_on_way
        return samples

    def owes(self) -> bool:
        """At the end of the data everything is pushed, even if a round has just ended."""
        self._take_rest_back(0, len(self._base))
        is_apart = self._has_model and bool((self._base != self.parameters).any())
        return is_apart and not self._has_data and not self._is_astray

    def _take_rest_back(self, lo: int, hi: int) -> None:
        """Merge the compressor's residual into the difference that is still to be pushed."""
        self._base[lo:hi] += self.residual[lo:hi]
        self.residual[lo:hi] = 0

    def _take_way(self) -> bool:
        self._take_rest_back(0, len(self._base))
        way = self._base - self.parameters
        if not is_finite(way):
            self._is_astray = True
            return False
        if self._has_data:
            where = indices_like(way, mask(self.view.clock_max, len(way), self.options.density))
            self.residual[where] = way[where]
            self._base[where] = self.parameters[where]
        else:
            self.residual[:] = way
            self._base[:] = self.parameters
        return True

    def placing(self, lo: int, hi: int) -> None:
        """This replica's unpushed steps will be added to the values read."""
        self._take_rest_back(lo, hi)
        if self._has_model and not self._is_astray:
            self._base[lo:hi] -= self.parameters[lo:hi]
        else:
            self._base[lo:hi] = 0

    def placed(self, lo: int, hi: int) -> None:
        super().placed(lo, hi)
        self._has_model = self._has_model or hi == len(self.parameters)


def mask(clock: int, size: int, density: float) -> Array:
    """int64[n], ascending: the elements that the round averages, the same for all replicas."""
    rng = np.random.default_rng([MASKS, clock])
    found = np.flatnonzero(rng.random(size, dtype=np.float32) < density)
    return found if found.size else rng.integers(0, size, 1)


class Shard(SparseSide, sync.Barrier):
    """All replicas of a round have equal weights, those without an update included."""

    def _counts(self, push: messages.Push) -> bool:
        return True

    def _shares(self, pushes: Sequence[messages.Push]) -> list[np.float32]:
        return even_shares(pushes)


ENTRIES = (
    "none", "fp16", "bf16", "topk", "topk-sampled", "topk-chunked", "gaussian", "gaussian-ref",
    "randomk", "int8", "e3m0",
)  # fmt: skip
"""The compressors that map zero to zero: others would push beyond the mask."""
LOSCAR = Method(
    Options=Options,
    shape=Shape(compressors=ENTRIES),
    replica=Replica,
    shard=Shard,
    live=local_sgd.LIVE,
    optimizer=Choice(name="sgd", options={"lr": 1.0}),
    inner=Choice(name="sgd", options={"lr": 0.01}),
    compression=Choice(name="topk", options={"density": 1.0}),
)
