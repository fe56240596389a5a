"""Sandblaster L-BFGS. Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, Alg. 1.2.

A batch method (§4.2): one evaluation is a pass over the whole dataset. The coordinator has no
vector; it sends the shards operations on their slices of named vectors, and receives only numbers.
A vector is a table of the servers, float64, but w, which is float32. f is the mean loss and g its
gradient at x, the newest accepted point; d the direction; i runs over the newest m iterations
(m = `history`), with s_i the step, y_i the change of the gradient by it, rho_i = 1 / s_i.y_i:

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

- Every portion is in every shard exactly once per batch, even if daemons die ("accrued" is a table
  of rule "parts"). A push is the sum of one portion and names it. If a worker dies when some shards
  have its push, another worker computes the portion again; those shards drop the duplicate (LATE),
  the others apply it. The first push of a batch replaces the sum of the previous batch; a batch is
  over when all of its portions are settled on all shards, and later pushes of it are dropped.
- "w" moves only between two batches. A portion that is in progress at that time is a duplicate of
  one that another replica has pushed, a backup copy or the original: its push is dropped. So one
  fetch per batch is enough, and no gradient that counts is of a mixture of two points.
- s and y are of the points that the replicas saw, rounded to float32, not of the exact t d.
- Operations are made once, and the coordinator replays its recorded results: except for rounding
  (portions and losses are added in order of arrival) the trajectory does not depend on which daemon
  dies when (`roles/coordinator/training/driven.py`). A stop in the middle of a search leaves the
  trial point in "w"; the run resumes with that trial. An operation and the next sum that does not
  wait for another one go in one round trip: 2m + 1 of them for a direction.

Where the paper says nothing: m, the line search and its c1 are ours. The first step along a
steepest descent is min(1, 1 / |g|_1), as in torch.optim.LBFGS. If g.d >= 0, or no step along d goes
down, the pairs are discarded and d = -g. A loss or gradient that is not finite, or too large, is a
point too far, unless a worker meets `workers.nonfinite_steps_max` such batches in a row. So is one
where a shard refuses a push, since g lacks that portion there, unless `workers.refused_pushes_max`
of a worker's are refused in a row. Every push holds one portion; the paper sends after "every few",
but a shard could not subtract one of several again, and larger portions have the same effect. Idle
replicas get backup copies of the stragglers' last portions
(`roles/coordinator/pools/portions.py`). Each shard decides on its own which copy wins: the one that
arrives first; both are of the same data.

The loss must be a function of the parameters alone: no dropout, no batch normalisation in training,
no random augmentation. A search without success is followed by another f at x. If the two differ by
more than rounding, `status` reports the problem "loss-noisy", and the reason of the end names it.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt

from dlctl.algorithms.base import (
    MODEL,
    BatchRequest,
    Change,
    Drives,
    DriveSnapshot,
    Driving,
    Fault,
    Lead,
    Method,
    Needs,
    ReplicaSide,
    Shape,
    Start,
    Sum,
    Table,
    VectorRequest,
)
from dlctl.algorithms.methods.line_search import Conditions, armijo, strong_wolfe
from dlctl.algorithms.needs import PARAMETERS, Gradient, NextData, Read, Write
from dlctl.job.config import JobFile
from dlctl.wire.messages import Json

ACCRUED = "accrued"
GRAM_HISTORY_MAX = 30
"""Pairs whose products with each other fit into one message, and into the records of a run."""
NOISE_MIN = 1e-5
"""Relative difference of two losses at the same point beyond which it is not rounding: float32, and
sums in another order."""
CURVATURE_MIN = 1e-10
"""A pair with s.y up to this has no useful curvature, and is left out (as in torch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    iterations: Annotated[int, Ge(1)] = 100
    """L-BFGS steps after which the run has finished. Each takes one or a few passes over the
    dataset; `epochs`, `steps` and `samples` of job.stop are ignored."""
    history: Annotated[int, Ge(1), Le(300)] = 10
    """Pairs of vectors that approximate the curvature, m; the servers store one more."""
    gradient_norm_min: Annotated[float, Ge(0)] = 1e-5
    """Euclidean norm of the gradient of the mean loss at which the run has finished."""
    c1: Annotated[float, Gt(0), Lt(1)] = 1e-4
    """Fraction of the decrease predicted by the slope that a step must achieve (Armijo)."""
    line_search: Literal["armijo", "strong-wolfe"] = "armijo"
    """"armijo": each trial step is half as long as the one before. "strong-wolfe": until the slope
    is flat as well (c2); more passes for a step, and often fewer steps."""
    c2: Annotated[float, Gt(0), Lt(1)] = 0.9
    """Fraction of the slope that may remain at the end of a step, for "strong-wolfe"."""
    trials_max: Annotated[int, Ge(1), Le(100)] = 20
    """Steps that one line search tries, each a pass over the dataset."""
    reduction: Literal["paper", "gram"] = "paper"
    """How a direction is computed. "paper": 2 m + 1 round trips, each with a sum that the next one
    needs. "gram": all sums in one, and the direction in another (Chen et al. 2014), for slow links;
    some 6 m sums for an iteration."""


# ---------------------------------------------------------------- worker


class Replica(ReplicaSide):
    """Computes portions, and pushes the sum of each when it is complete."""

    def begin(self, start: Start) -> None:
        self.accrued = self.residual
        # A portion that was not pushed is computed again by another worker: nothing is saved.
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
                yield Write(
                    table=ACCRUED, vector=self.accrued, samples=samples,
                    clock=clock, part=data.portion,
                )  # fmt: skip
                self.accrued[:] = 0
                samples = 0


# ---------------------------------------------------------------- coordinator

T = TypeVar("T")
Part = Generator[Driving, Any, T]
"""A step of the L-BFGS algorithm, as a generator of vector operations that returns a T."""


@dataclass(frozen=True, slots=True)
class HistoryPair:
    """Products of "s<slot>" and "y<slot>", which are on the shards."""

    slot: int
    rho: float
    """1 / s.y"""
    gamma: float
    """s.y / y.y"""


@dataclass(slots=True)
class LBFGS(Lead):
    """The optimiser. It has only numbers; the vectors are "x", "g", "d", "t", "s0", "y0", ..."""

    portions = "batch"

    pairs: list[HistoryPair] = field(default_factory=list)
    """Oldest first, at most `history`."""
    loss: float = math.inf
    """f at x; infinite: x is not set yet."""
    norm: float = math.inf
    """The Euclidean norm of the gradient at x."""
    iteration: int = 0
    batches: int = 0
    """Passes over the dataset."""
    unequal: tuple[float, float] | None = None
    """Two values of f at the same point; None: none are known that differ."""
    dots: dict[str, float] = field(default_factory=dict)
    """"s0 y1" -> s0.y1, the known products of the pairs; for the reduction "gram"."""

    def state(self) -> Json:
        pairs = [[pair.slot, pair.rho, pair.gamma] for pair in self.pairs]
        numbers = [repr(self.loss), repr(self.norm)]  # JSON has no infinity.
        counts = [self.iteration, self.batches]
        state: Json = {"pairs": pairs, "at": numbers, "counts": counts, "dots": dict(self.dots)}
        return state if self.unequal is None else state | {"unequal": [*self.unequal]}

    def resume(self, state: Json) -> None:
        if state:
            pairs = [HistoryPair(*pair) for pair in state["pairs"]]
            self.pairs = [p for p in pairs if p.slot <= self.options.history]
            self.pairs = self.pairs[-self.options.history :]
            self.loss, self.norm = map(float, state["at"])
            self.iteration, self.batches = state["counts"]
            self.dots = dict(state.get("dots", {}))
            self.unequal = tuple(state["unequal"]) if "unequal" in state else None

    def figures(self) -> Json:
        if not math.isfinite(self.loss):
            return {"iteration": self.iteration, "batches": self.batches}
        return {
            "iteration": self.iteration, "batches": self.batches,
            "loss": self.loss, "gradient_norm": self.norm,
        }  # fmt: skip

    def loss_noise(self) -> str:
        if self.unequal is None:
            return ""
        return "at the same parameters it was {:.6g} and then {:.6g}".format(*self.unequal)

    def drive(self) -> Drives:
        if not math.isfinite(self.loss):
            self.loss = yield from self._evaluate()
            if not math.isfinite(self.loss):
                return (
                    "the loss or the gradient of the initial parameters is not finite, or refused"
                )
            yield from self._move()
            yield DriveSnapshot()
        while self.iteration < self.options.iterations:
            if self.norm <= self.options.gradient_norm_min:
                return f"the norm of the gradient is {self.norm:.3g}"
            moved = yield from self._iterate()
            if not moved:
                why = "no step goes down any more"
                if self.unequal is None:
                    return why
                advice = "avoid dropout and random augmentation, or choose another method"
                return f"{why}: the loss depends on chance: {self.loss_noise()}; {advice}"
            self.iteration += 1
            yield DriveSnapshot()
        return f"{self.iteration} iterations are done"

    def _iterate(self) -> Part[bool]:
        """One L-BFGS step; False if none was found, "w" is "x" then."""
        slope = yield from self._direction()
        if slope < 0:
            if (yield from self._search(slope)):
                yield from self._accept()
                return True
            yield from self._compare()
        if not self.pairs:
            yield VectorRequest((Change("copy", "x", PARAMETERS),))
            return False
        self.pairs.clear()
        return (yield from self._iterate())

    def _compare(self) -> Part[None]:
        """Compute f at "x" again, unless it is known to depend on chance."""
        if self.unequal is not None:
            return
        yield VectorRequest((Change("copy", "x", PARAMETERS),))
        again = yield from self._evaluate()
        if math.isfinite(again) and abs(again - self.loss) > NOISE_MIN * abs(self.loss):
            self.unequal = (self.loss, again)

    def _evaluate(self) -> Part[float]:
        """f at "w"; its gradient is "accrued" then."""
        losses, samples = yield BatchRequest()
        self.batches += 1
        yield VectorRequest((Change("copy", ACCRUED, ACCRUED, 1 / samples),))
        return float(losses / samples)

    def _direction(self) -> Part[float]:
        """The two-loop recursion: "d" = -H g. Returns its slope, g.d."""
        if self.options.reduction == "gram":
            return (yield from self._direction_of_gram())
        changes, alphas = [Change("copy", "g", "d")], []
        for pair in reversed(self.pairs):
            s_d = yield from _after(changes, Sum("dot", f"s{pair.slot}", "d"))
            alphas.append(pair.rho * s_d)
            changes = [Change("axpy", f"y{pair.slot}", "d", -alphas[-1])]
        if self.pairs:
            changes.append(Change("copy", "d", "d", self.pairs[-1].gamma))
        for pair in self.pairs:
            y_d = yield from _after(changes, Sum("dot", f"y{pair.slot}", "d"))
            beta = pair.rho * y_d
            changes = [Change("axpy", f"s{pair.slot}", "d", alphas.pop() - beta)]
        changes.append(Change("copy", "d", "d", -1.0))
        return (yield from _after(changes, Sum("dot", "g", "d")))

    def _direction_of_gram(self) -> Part[float]:
        """The two-loop recursion on the coefficients of "d" in the pairs and g, whose products with
        each other are all that it needs.
        """
        vectors = [f"{kind}{pair.slot}" for pair in self.pairs for kind in "sy"]
        known = {name: self.dots[name] for name in _products(vectors) if name in self.dots}
        missing = [name for name in _products([*vectors, "g"]) if name not in known]
        sums = yield VectorRequest((), tuple(Sum("dot", *name.split()) for name in missing))
        found = known | dict(zip(missing, sums, strict=True))
        self.dots = {name: value for name, value in found.items() if "g" not in name}
        part = dict.fromkeys([*vectors, "g"], 0.0) | {"g": 1.0}

        def dot(name: str) -> float:
            """The product of a vector with the combination of the vectors."""
            return math.fsum(value * found[_product(name, other)] for other, value in part.items())

        alphas = []
        for pair in reversed(self.pairs):
            alphas.append(pair.rho * dot(f"s{pair.slot}"))
            part[f"y{pair.slot}"] -= alphas[-1]
        if self.pairs:
            part = {name: value * self.pairs[-1].gamma for name, value in part.items()}
        for pair in self.pairs:
            part[f"s{pair.slot}"] += alphas.pop() - pair.rho * dot(f"y{pair.slot}")
        slope = -dot("g")
        changes = [Change("axpy", name, "d", -value) for name, value in part.items() if name != "g"]
        yield VectorRequest((Change("copy", "g", "d", -part["g"]), *changes))
        return slope

    def _search(self, slope: float) -> Part[bool]:
        """Try steps along "d"; True if "w" is a better point then."""
        options, first = self.options, 1.0
        if not self.pairs:
            first = min(1.0, 1.0 / (yield from _after([], Sum("norm1", "g"))))
        is_wolfe = options.line_search == "strong-wolfe"
        search = (strong_wolfe if is_wolfe else armijo)(
            first, options.trials_max, Conditions(self.loss, slope, options.c1, options.c2)
        )
        step = next(search)
        while True:
            yield VectorRequest(
                (
                    Change("copy", "x", "t"),
                    Change("axpy", "d", "t", step),
                    Change("copy", "t", PARAMETERS),
                )
            )
            loss = yield from self._evaluate()
            along = (yield from _after([], Sum("dot", ACCRUED, "d"))) if is_wolfe else 0.0
            try:
                step = search.send((loss, along))
            except StopIteration as end:
                self.loss = self.loss if end.value is None else loss
                return end.value is not None

    def _accept(self) -> Part[None]:
        """Move "x" and "g" to "w" and "accrued", and record the pair."""
        used = {pair.slot for pair in self.pairs}
        slot = next(free for free in range(self.options.history + 1) if free not in used)
        s, y = f"s{slot}", f"y{slot}"
        sy, yy = yield VectorRequest(
            (
                Change("copy", PARAMETERS, s), Change("axpy", "x", s, -1.0),
                Change("copy", ACCRUED, y), Change("axpy", "g", y, -1.0),
            ),
            (Sum("dot", s, y), Sum("dot", y, y)),
        )  # fmt: skip
        if sy > CURVATURE_MIN:
            self.pairs = [*self.pairs, HistoryPair(slot, 1 / sy, sy / yy)][-self.options.history :]
        self.dots = {n: dot for n, dot in self.dots.items() if {s, y}.isdisjoint(n.split())}
        yield from self._move()

    def _move(self) -> Part[None]:
        """Set "x" and "g" to "w" and "accrued"."""
        changes = [Change("copy", PARAMETERS, "x"), Change("copy", ACCRUED, "g")]
        self.norm = math.sqrt((yield from _after(changes, Sum("dot", "g", "g"))))


def _product(x: str, y: str) -> str:
    """The name of a product, the same for both orders."""
    return " ".join(sorted((x, y)))


def _products(names: Sequence[str]) -> list[str]:
    """The names of all their products with each other."""
    return [_product(x, y) for at, x in enumerate(names) for y in names[: at + 1]]


def _after(changes: list[Change], wanted: Sum) -> Part[float]:
    """Make these changes, and one sum after them."""
    (value,) = yield VectorRequest(tuple(changes), (wanted,))
    return float(value)


def _led(name: str) -> Table:
    return Table(name=name, rule="lead", dtype="float64")


def check(job: JobFile) -> list[Fault]:
    """Conflicting options of the job file."""
    found: list[Fault] = []
    options = Options(**job.algorithm.options)
    if options.reduction == "gram" and options.history > GRAM_HISTORY_MAX:
        what = f'reduction = "gram" has all products of the pairs, of at most {GRAM_HISTORY_MAX}'
        found.append((("algorithm", "history"), what, 'make it smaller, or take "paper"'))
    if options.line_search == "strong-wolfe" and not options.c1 < options.c2:
        what = f"must be more than c1, which is {options.c1:g}"
        found.append((("algorithm", "c2"), what, "as in c1 = 1e-4, c2 = 0.9"))
    return found


SANDBLASTER = Method(
    Options=Options,
    replica=Replica,
    lead=LBFGS,
    check=check,
    shape=Shape(
        tables=(
            replace(MODEL, rule="lead"),
            Table(name=ACCRUED, rule="parts", dtype="float64"),
            *map(_led, "xgdt"),
            replace(_led("s"), copies=lambda options: options.history + 1),
            replace(_led("y"), copies=lambda options: options.history + 1),
        ),
        progress=ACCRUED,
        exact=True,
        same_loss=True,
    ),
)
