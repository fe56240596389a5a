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

from dlctl.algorithms.barrier import Barrier
from dlctl.algorithms.base import Method, Needs, PushKind, ReplicaSide, Shape, Start
from dlctl.algorithms.means import SparseMean, even_shares
from dlctl.algorithms.methods import local_sgd
from dlctl.algorithms.rounds import Reference, Rounds, Steps
from dlctl.job.config import Choice
from dlctl.model.vector import Vector, copy_into, copy_of, indices_like, is_finite
from dlctl.wire import messages
from dlctl.wire.messages import Array

MASKS = 0x105CA4
"""Seeds the masks, with the number of the round."""


@dataclass(slots=True, kw_only=True)
class Options(local_sgd.Options):
    density: Annotated[float, Gt(0), Le(1)] = 0.01
    """Fraction of the parameters that a round averages."""
    overlap: bool = True
    """Continue with the next round while the mean of this one is in flight; false: wait."""


class Replica(ReplicaSide):
    keeps_position = True
    options: Options

    @classmethod
    def one_push(cls, options: Any) -> PushKind:
        return PushKind(options.local_steps, is_displacement=True, is_all=False)

    def begin(self, start: Start) -> None:
        self.rounds = self.arrival = Apart(self)

    def state(self) -> dict[str, Vector]:
        own = {"own": self.parameters, "base": self.rounds.vector}
        return {"residual": self.residual, **own}

    def restore(self, state: Mapping[str, Array]) -> None:
        super().restore(state)
        if {"own", "base"} <= state.keys() and state["own"].size == len(self.parameters):
            copy_into(self.parameters, state["own"])
            copy_into(self.rounds.vector, state["base"])
            self.rounds.has_model = True

    def run(self) -> Needs:
        rounds = self.rounds
        return local_sgd.averaged(self, rounds, self._end_round, rounds.has_rest)

    def _end_round(self) -> bool:
        """Move what the round averages from the reference to the residual; at the end of the data
        all that is left."""
        rounds = self.rounds
        apart = rounds.apart()
        if not is_finite(apart):
            rounds.is_diverged = True
            return False
        if rounds.has_data:
            where = indices_like(apart, mask(self.view.clock_max, len(apart), self.options.density))
            self.residual[where] = apart[where]
            rounds.vector[where] = self.parameters[where]
        else:
            self.residual[:] = apart
            rounds.vector[:] = self.parameters
        return True


class Apart(Rounds):
    """A reference that is never given up: outside of the masks a replica's own steps add up."""

    vector: Vector

    def __init__(self, side: ReplicaSide) -> None:
        super().__init__(side)
        self.vector = copy_of(side.parameters)
        self.is_diverged = False

    def carries(self) -> bool:
        return self.has_model and not self.is_diverged

    def before(self, lo: int, hi: int) -> None:
        self._take_rest_back(lo, hi)
        Reference.before(self, lo, hi)

    def steps(self, count: int, *, in_portion: bool = False) -> Steps:
        self.is_diverged = False
        samples = yield from super().steps(count, in_portion=in_portion)
        self.is_diverged = not self.is_open
        return samples

    def has_rest(self) -> bool:
        """Whether a rest is to be pushed at the end of the data, even if a round has just ended."""
        is_apart = self.has_model and bool(self.apart().any())
        return is_apart and not self.has_data and not self.is_diverged

    def apart(self) -> Vector:
        """float32[d]: all that is still to be pushed."""
        self._take_rest_back(0, len(self.vector))
        return self.vector - self.side.parameters

    def _take_rest_back(self, lo: int, hi: int) -> None:
        """Merge the compressor's residual into the difference that is still to be pushed."""
        self.vector[lo:hi] += self.side.residual[lo:hi]
        self.side.residual[lo:hi] = 0


def mask(clock: int, size: int, density: float) -> Array:
    """int64[n], ascending: the elements that the round averages, the same for all replicas."""
    rng = np.random.default_rng([MASKS, clock])
    found = np.flatnonzero(rng.random(size, dtype=np.float32) < density)
    return found if found.size else rng.integers(0, size, 1)


class OfAll(SparseMean):
    """All replicas of a round have equal weights, those without an update included."""

    def counts(self, push: messages.Push) -> bool:
        return True

    def shares(self, pushes: Sequence[messages.Push]) -> list[np.float32]:
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
    shard=Barrier,
    mean=OfAll,
    optimizer=Choice(name="sgd", options={"lr": 1.0}),
    inner=Choice(name="sgd", options={"lr": 0.01}),
    compression=Choice(name="topk", options={"density": 1.0}),
)
