"""Sandblaster L-BFGS. Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, Alg. 1.2.

A batch method (§4.2): one evaluation is a pass over the whole dataset. The coordinator has no
vector; it tells the shards, by name, what to do with their slices of them, and only numbers come
back to it. f is the mean loss and g its gradient at x, the newest accepted point; d the direction;
i runs over the newest m iterations (m = `history`), with s_i the step that was made, y_i what it
did to the gradient, rho_i = 1 / s_i.y_i:

    f, g = evaluate(x)
    for k = 1 .. iterations:
        q = g                                                 # the two-loop recursion: d = -H g
        for i = newest .. oldest:  alpha_i = rho_i (s_i.q);  q -= alpha_i y_i
        q *= gamma                                            # s.y / y.y of the newest pair
        for i = oldest .. newest:  beta = rho_i (y_i.q);  q += (alpha_i - beta) s_i
        d = -q
        find t in 1, 1/2, 1/4, ...:  f(x + t d) <= f + c1 t (g.d)
        s = t d;  y = g(x + t d) - g;  if s.y > 1e-10: keep the pair, forget the oldest beyond m
        x += t d

    evaluate(w):  accrued = 0
                  each replica, while there are portions:
                      fetch w, once per batch
                      push the sum of a portion's gradients     # the shards: accrued += it
                  f = sum of the losses / |B|;  g = accrued / |B|

Rules:

- Every portion is in every shard exactly once per batch, whoever dies. A push is the sum of one
  portion and says which. A worker that dies when some shards have its push leaves its portion to
  another worker; those shards drop the second push of it (LATE), the others take it. A batch is
  over when all of its portions are settled on all shards: whatever comes of it afterwards finds
  its portion there already, or pushes of a newer batch, and is dropped. So nothing of an older
  batch gets into a newer one, although "accrued" is zeroed by another message than a push.
- "w" moves only between two batches, and a batch is not over while a living replica holds a portion
  of it. So one fetch per batch is enough, and no gradient is of a mixture of two points.
- s and y are of the points that the replicas saw, rounded to float32, not of the exact t d.

Where the paper says nothing: m, the line search and its c1 are ours. The first step along a
steepest descent is min(1, 1 / |g|_1), as in torch.optim.LBFGS. If g.d >= 0, or no step along d goes
down, the pairs are forgotten and d = -g. A loss or gradient that is not finite, or too large, is a
point too far, unless a worker meets `workers.nonfinite_steps_max` such batches in a row. So is one
where a shard refuses a push, since g lacks that portion there, unless `workers.refused_pushes_max`
of a worker's are refused in a row. Every push holds one portion; the paper sends after "every few",
but a shard could not take one out of several again, and larger portions come to the same. The last
portions of slow replicas are not given to others besides (backup copies) so far.

The loss must be a function of the parameters alone: no dropout, no batch normalisation in training.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from dlctl import messages
from dlctl.algorithms.base import (
    BatchRequest,
    Drives,
    Lead,
    Method,
    Needs,
    Outcome,
    ReplicaSide,
    Shape,
    ShardSide,
    Start,
    VectorRequest,
    dense,
)
from dlctl.algorithms.needs import Gradient, NextData, Read, Write
from dlctl.compress.base import Delta
from dlctl.messages import APPLIED, LATE
from dlctl.shards.base import Shard

ACCRUED = "accrued"
CURVATURE_MIN = 1e-10
"""A pair with s.y up to this says nothing of a minimum, and is left out (as in torch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    iterations: Annotated[int, Ge(1)] = 100
    """Steps to other parameters after which the run has finished. Each takes a pass over the
    dataset or a few; `epochs`, `steps` and `samples` of job.stop are not looked at."""
    history: Annotated[int, Ge(1), Le(1000)] = 10
    """Pairs of vectors that the curvature is known from, m; the servers keep one more."""
    gradient_norm_min: Annotated[float, Ge(0)] = 1e-5
    """Euclidean norm of the gradient of the mean loss at which the run has finished."""
    c1: Annotated[float, Gt(0), Lt(1)] = 1e-4
    """Part of the decrease that the slope promises which a step must bring (Armijo)."""
    trials_max: Annotated[int, Ge(1), Le(100)] = 20
    """Steps that one line search tries, each half as long as the one before and a pass over the
    dataset."""


# ---------------------------------------------------------------- worker


class Replica(ReplicaSide):
    """Computes portions, and pushes the sum of each when it is complete."""

    def begin(self, start: Start) -> None:
        self.accrued = self.residual
        # A portion that was not pushed is computed again, by whoever gets it: nothing is saved.
        self.residual = self.accrued[:0]

    def run(self) -> Needs:
        clock, samples = -1, 0
        while True:
            data = yield NextData()
            if data is None:
                continue
            if data.data_epoch != clock:
                yield Read(wait=True)
                clock = data.data_epoch
            computed = yield Gradient()
            if computed is not None:
                self.accrued += computed.gradient * computed.samples
                samples += computed.samples
            if data.is_last and samples:
                yield Write(vector=self.accrued, samples=samples, clock=clock, part=data.portion)
                self.accrued[:] = 0
                samples = 0


# ---------------------------------------------------------------- server


class Accruing(ShardSide):
    """Adds every portion of a batch to "accrued", once; "w" and the optimiser are not touched."""

    def __init__(self, options: Options, shard: Shard) -> None:
        super().__init__(options, shard)
        self._accrued = shard.vectors[ACCRUED] = np.zeros(shard.size)
        self._clock = 0
        self._portions: set[int] = set()
        """Portions of batch `_clock` that are in "accrued"."""

    def push(self, push: messages.Push, delta: Delta) -> list[Outcome]:
        if push.clock > self._clock:
            self._clock, self._portions = push.clock, set()
        kind = LATE
        if push.clock == self._clock and push.portion not in self._portions:
            self._portions.add(push.portion)
            self._accrued += dense(delta, self.shard.size)
            kind = APPLIED
        return [Outcome(push.slot, push.epoch, push.seq, kind)]


# ---------------------------------------------------------------- coordinator

T = TypeVar("T")
Number = Generator[VectorRequest, float, float]
Part = Generator[VectorRequest | BatchRequest, Any, T]
"""Of the method, with batches in it; `Number` is one with vector operations only."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What is known of "s<slot>" and "y<slot>" on the shards."""

    slot: int
    rho: float
    """1 / s.y"""
    gamma: float
    """s.y / y.y"""


@dataclass(slots=True)
class LBFGS(Lead):
    """The optimiser. All its state is numbers; the vectors are "x", "g", "d", "s0", "y0", ..."""

    pairs: list[Pair] = field(default_factory=list)
    """Oldest first, at most `history`."""
    loss: float = math.inf
    """f at x."""
    iteration: int = 0
    batches: int = 0
    """Passes over the dataset."""

    def drive(self) -> Drives:
        self.loss = yield from self._evaluate()
        if not math.isfinite(self.loss):
            return "the loss or the gradient of the initial parameters is not finite, or refused"
        yield VectorRequest("copy", "w", "x")
        yield VectorRequest("copy", ACCRUED, "g")
        while self.iteration < self.options.iterations:
            norm = math.sqrt((yield from _dot("g", "g")))
            if norm <= self.options.gradient_norm_min:
                return f"the norm of the gradient is {norm:.3g}"
            moved = yield from self._iterate()
            if not moved:
                return "no step goes down any more"
            self.iteration += 1
        return f"{self.iteration} iterations are done"

    def _iterate(self) -> Part[bool]:
        """One step to other parameters; False if none was found, "w" is "x" then."""
        slope = yield from self._direction()
        if slope < 0 and (yield from self._search(slope)):
            yield from self._accept()
            return True
        if not self.pairs:
            yield VectorRequest("copy", "x", "w")
            return False
        self.pairs.clear()
        return (yield from self._iterate())

    def _evaluate(self) -> Part[float]:
        """f at "w", and its gradient in "accrued"."""
        yield VectorRequest("zero", ACCRUED)
        losses, samples = yield BatchRequest(self.batches)
        self.batches += 1
        yield VectorRequest("scale", ACCRUED, a=1 / samples)
        return float(losses / samples)

    def _direction(self) -> Number:
        """The two-loop recursion: "d" = -H g. Returns its slope, g.d."""
        yield VectorRequest("copy", "g", "d")
        alphas = []
        for pair in reversed(self.pairs):
            alphas.append(pair.rho * (yield from _dot(f"s{pair.slot}", "d")))
            yield VectorRequest("axpy", f"y{pair.slot}", "d", -alphas[-1])
        if self.pairs:
            yield VectorRequest("scale", "d", a=self.pairs[-1].gamma)
        for pair in self.pairs:
            beta = pair.rho * (yield from _dot(f"y{pair.slot}", "d"))
            yield VectorRequest("axpy", f"s{pair.slot}", "d", alphas.pop() - beta)
        yield VectorRequest("scale", "d", a=-1.0)
        return (yield from _dot("g", "d"))

    def _search(self, slope: float) -> Part[bool]:
        """Try shorter and shorter steps along "d"; True if "w" is a better point then."""
        step = 1.0
        if not self.pairs:
            step = min(1.0, 1.0 / (yield VectorRequest("norm1", "g")))
        for _ in range(self.options.trials_max):
            yield VectorRequest("copy", "x", "w")
            yield VectorRequest("axpy", "d", "w", step)
            loss = yield from self._evaluate()
            # As a difference: added to the loss, a small promise would be rounded away.
            if loss - self.loss <= self.options.c1 * step * slope:
                self.loss = loss
                return True
            step /= 2
        return False

    def _accept(self) -> Part[None]:
        """Move "x" and "g" to "w" and "accrued", and learn from the step."""
        used = {pair.slot for pair in self.pairs}
        slot = next(free for free in range(self.options.history + 1) if free not in used)
        s, y = f"s{slot}", f"y{slot}"
        yield VectorRequest("copy", "w", s)
        yield VectorRequest("axpy", "x", s, -1.0)
        yield VectorRequest("copy", ACCRUED, y)
        yield VectorRequest("axpy", "g", y, -1.0)
        sy = yield from _dot(s, y)
        if sy > CURVATURE_MIN:
            gamma = sy / (yield from _dot(y, y))
            self.pairs = [*self.pairs, Pair(slot, 1 / sy, gamma)][-self.options.history :]
        yield VectorRequest("copy", "w", "x")
        yield VectorRequest("copy", ACCRUED, "g")


def _dot(x: str, y: str) -> Number:
    return (yield VectorRequest("dot", x, y))


SANDBLASTER = Method(
    Options=Options,
    replica=Replica,
    shard=Accruing,
    lead=LBFGS,
    shape=Shape(
        exact=True,
        simulated_only=True,
        # The coordinator knows the optimiser's numbers, the shards its vectors. They change
        # together, operation by operation, and no commit of one shard would fit the others'.
        survives=frozenset({"worker"}),
    ),
)
