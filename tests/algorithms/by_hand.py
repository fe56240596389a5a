"""Methods played by hand: their three sides and the real shards, with nothing of the roles between.

What the roles promise to a method is kept here in a few lines, so that a test sees every request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dlctl import messages as m
from dlctl.algorithms.base import (
    Algorithm,
    BatchRequest,
    CoordinatorSide,
    Data,
    Fetch,
    NextData,
    NextGradient,
    Push,
    Step,
    VectorRequest,
)
from dlctl.compress.base import Delta
from dlctl.flat import slice_bounds
from dlctl.messages import HELD, Array
from dlctl.optim.sgd import SGD
from dlctl.roles.server.vectors import Vectors
from dlctl.shards.memory import in_memory
from dlctl.vector import euclidean_norm

Batch = tuple[Data, Any]
"""What a replica is told of a batch, and what the test's gradient makes of it."""
Gradient = Callable[[Array, Any], Step]
"""(parameters, the batch) -> its gradient."""


class Shards:
    """All shards of the vector `w` (float32[d]), with the method's server side on each."""

    def __init__(self, algorithm: Algorithm, w: Array, count: int, options: Any = None) -> None:
        self.bounds = [slice_bounds(w.size, count, index) for index in range(count)]
        self.shards = [
            in_memory(SGD(SGD.Options(lr=0.1)), w[lo:hi].astype(np.float32))
            for lo, hi in self.bounds
        ]
        options = options if options is not None else algorithm.Options()
        self.sides = [algorithm.server(options, shard) for shard in self.shards]
        self.vectors = [Vectors(shard) for shard in self.shards]
        self.outcomes: defaultdict[tuple[int, int, int, int], list[str]] = defaultdict(list)
        """(shard, slot, epoch, seq) -> what its server side said became of this push."""
        self._number = 0

    def whole(self, name: str = "w") -> Array:
        """A vector, put together from its slices."""
        return np.concatenate([s.w if name == "w" else s.vectors[name] for s in self.shards])

    def put(self, name: str, values: Array) -> None:
        for shard, (lo, hi) in zip(self.shards, self.bounds, strict=True):
            shard.vectors.setdefault(name, np.zeros(hi - lo))[:] = values[lo:hi]

    def perform(self, request: VectorRequest) -> float:
        self._number += 1
        op = m.VectorOp(self._number, request.op, float(request.a), request.x, request.y)
        partials = [vectors.run(op) for vectors in self.vectors]
        assert None not in partials
        return float(sum(partials))  # type: ignore[arg-type]

    def push(self, request: Push, values: Array, who: tuple[int, int, int]) -> None:
        """who: (slot, epoch, seq)."""
        for index in range(len(self.shards)):
            self.push_to(index, request, values, who)

    def push_to(self, index: int, request: Push, values: Array, who: tuple[int, int, int]) -> None:
        side, (lo, hi) = self.sides[index], self.bounds[index]
        slot, epoch, seq = who
        delta, version = Delta(values[lo:hi].copy()), self.shards[index].version
        packed = m.Packed("none", hi - lo, (delta.values,))
        push = m.Push(
            slot, epoch, 1, seq, version, 0, 0, request.samples, request.clock, packed,
            request.portion,
        )  # fmt: skip
        for outcome in side.push(push, delta):
            key = (index, outcome.slot, outcome.epoch, outcome.seq)
            self.outcomes[key].append(outcome.kind)

    def settled(self) -> dict[tuple[int, int, int, int], list[str]]:
        """What settled every push for good."""
        return {
            key: [kind for kind in kinds if kind != HELD] for key, kinds in self.outcomes.items()
        }


@dataclass
class Player:
    """One replica: serves its requests, with the batches that it is given."""

    algorithm: Algorithm
    shards: Shards
    gradient: Gradient
    slot: int = 0
    epoch: int = 1
    todo: list[Batch] = field(default_factory=list)
    samples: int = 0
    """Computed; likewise those that were pushed."""
    samples_pushed: int = 0
    pushed: Array = field(init=False)
    """float64[d], the sum of all that was pushed."""
    fetches: int = 0

    def __post_init__(self) -> None:
        size = self.shards.bounds[-1][1]
        self.parameters = np.full(size, np.nan, np.float32)
        self.pushed = np.zeros(size)
        self.side = self.algorithm.worker(self.algorithm.Options(), self.parameters, self.slot)
        self._run = self.side.run()
        self._seq = 0
        self._fetching: int | None = None
        """The clock that the fetch under way waits for."""
        self.request: Any = next(self._run)

    def needs_data(self) -> bool:
        return isinstance(self.request, NextData | NextGradient)

    def go_on(self) -> None:
        """Until it needs a batch and has none, or waits for another replica."""
        done = True
        while done:
            self._place_arrivals()
            done, value = self._serve()
            if done:
                self.request = self._run.send(value)

    def tell_none(self) -> None:
        """There is no data for now."""
        assert self.needs_data()
        assert not self.todo
        self.request = self._run.send(None)
        self.go_on()

    def _serve(self) -> tuple[bool, Any]:
        match self.request:
            case NextData():
                return (True, self.todo[0][0]) if self.todo else (False, None)
            case NextGradient(own_lr):
                return (True, self._compute(own_lr)) if self.todo else (False, None)
            case Push():
                self._push(self.request)
                return True, None
            case Fetch(wait, clock_min):
                self._fetching = clock_min if self._fetching is None else self._fetching
                self._place_arrivals()
                done = not wait or self._fetching is None
                return done, self.side.fetched_clock if done else None
        raise AssertionError(f"{self.request} is no request that a role knows")

    def _place_arrivals(self) -> None:
        clock = min(side.clock() for side in self.shards.sides)
        if self._fetching is None or clock < self._fetching:
            return
        self._fetching = None
        self.side.settle()
        self.parameters[:] = self.shards.whole()
        self.side.placed(0, self.parameters.size)
        self.side.fetched_clock = clock
        self.fetches += 1

    def _compute(self, own_lr: float | None) -> Step | None:
        _, batch = self.todo.pop(0)
        step = self.gradient(self.parameters, batch)
        if not (np.isfinite(step.loss) and np.isfinite(step.gradient).all()):
            return None
        self.samples += step.samples
        norm = euclidean_norm(step.gradient)
        if own_lr is None:
            return step._replace(norm=norm)
        self.parameters -= own_lr * step.gradient
        return Step(None, step.samples, step.loss, norm)

    def _push(self, request: Push) -> None:
        size = self.parameters.size
        values = np.zeros(size, np.float32) if request.vector is None else request.vector.copy()
        if request.vector is not None:
            request.vector[:] = 0
        self.samples_pushed += request.samples
        self.pushed += values
        self.shards.push(request, values, (self.slot, self.epoch, self._seq))
        self._seq += 1


Evaluate = Callable[[int], tuple[float, int]]
"""A batch, by its clock: (sum of losses, samples); puts the gradients into "accrued"."""


def requests(
    side: CoordinatorSide, shards: Shards, evaluate: Evaluate
) -> Iterator[VectorRequest | BatchRequest | str]:
    """Drive a method to its end: every request when it has been performed, then why it is over."""
    drives = side.drive()
    assert drives is not None
    request = next(drives)
    while True:
        if isinstance(request, BatchRequest):
            value: Any = evaluate(request.clock)
        else:
            value = shards.perform(request)
        yield request
        try:
            request = drives.send(value)
        except StopIteration as end:
            yield end.value
            return


def drive(side: CoordinatorSide, shards: Shards, evaluate: Evaluate) -> str:
    """Drive a method to its end; returns why it is over."""
    *_, reason = requests(side, shards, evaluate)
    assert isinstance(reason, str)
    return reason
