"""Steps that a replica makes on its own, from one exchange to the next, and what they add up to.

`local_steps` makes them, `step_alone` a single one. `Reference` is the point from which they count,
and says what becomes of them when other values are read. `Rounds` is both together, for methods
that push the displacement of a whole round:

    self.rounds = self.arrival = Rounds(self)
    ...
    samples = yield from self.rounds.steps(h)      # 0: the steps have diverged
    if samples and self.rounds.end():              # the displacement is in the residual now
        yield self.write_residual(samples=samples)
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

from dlctl.algorithms.base import Arrival, ReplicaSide
from dlctl.algorithms.needs import Done, Gradient, NextBatch, NextData, Step
from dlctl.model.vector import Vector, copy_of, is_finite

Steps = Generator[NextData | Gradient, Any, int]
"""Makes steps; returns their samples."""
DISCARDED_MAX = 10
"""Discarded gradients in a row. With up to a tenth of the data NaN, so many are hardly due to the
data: the replica's own steps have ruined it. It resumes from the servers' parameters if
`workers.nonfinite_steps_max` is larger; else it is quarantined before.
"""


class Discards:
    """Counts gradients that were discarded one after the other."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def count(self, step: Step | None) -> bool:
        """step: the result of a `Gradient`. Returns whether it was discarded."""
        self.in_a_row = 0 if step is not None else self.in_a_row + 1
        return step is None

    @property
    def is_diverged(self) -> bool:
        """Whether the replica's own steps have led to where no gradient is usable."""
        return self.in_a_row >= DISCARDED_MAX


class StepsMade(NamedTuple):
    """The steps that `local_steps` has made."""

    steps: int
    samples: int
    has_data: bool = True
    """False: the data has ended before all steps were made."""
    is_diverged: bool = False
    """`Discards.is_diverged`; fewer steps were made."""


def step_alone() -> Generator[NextData | Gradient | Done, Any, bool]:
    """Make one step with the replica's own optimiser that counts as done at once, for methods that
    push nothing. Returns whether it was made; False: there was no data, or it was discarded.
    """
    if (yield NextData()) is None or (yield Gradient(step=True, gather=False)) is None:
        return False
    yield Done()
    return True


def local_steps(
    count: int, *, in_portion: bool = False
) -> Generator[NextData | Gradient, Any, StepsMade]:
    """Make so many steps with the replica's own optimiser; batches that are discarded are none.

    in_portion: and none behind the last batch of a portion.
    """
    made, discards = StepsMade(0, 0), Discards()
    while made.steps < count:
        batch: NextBatch | None = yield NextData()
        if batch is None:
            return made._replace(has_data=False)
        step = yield Gradient(step=True, gather=False, more=count - made.steps - 1)
        if step is not None:
            made = StepsMade(made.steps + step.steps, made.samples + step.samples)
        discards.count(step)
        if discards.is_diverged:
            return made._replace(is_diverged=True)
        if in_portion and batch.is_last:
            break
    return made


class Reference(Arrival):
    """The point from which the steps count that no push holds: the values that were read last.

    Where it `carries`, values that are read replace the reference, and the steps since are added to
    them; else the values replace the model, and the steps are gone.
    """

    def __init__(self, side: ReplicaSide) -> None:
        self.side = side
        self.vector: Vector | None = None
        """float32[d]; None: the values that are read are of no use as a reference."""
        self.has_model = False
        """Whether a whole model was read since the start, or since this was reset."""

    def carries(self) -> bool:
        return self.has_model

    def before(self, lo: int, hi: int) -> None:
        if self.vector is None:
            return
        if self.carries():
            self.vector[lo:hi] -= self.side.parameters[lo:hi]
        else:
            self.vector[lo:hi] = 0

    def after(self, lo: int, hi: int) -> None:
        if self.vector is not None:
            self.side.parameters[lo:hi] -= self.vector[lo:hi]
            self.vector[lo:hi] += self.side.parameters[lo:hi]
        self.has_model |= hi == len(self.side.parameters)


class Rounds(Reference):
    """A reference that lasts for a round: taken at its first step, given up at its end."""

    def __init__(self, side: ReplicaSide) -> None:
        super().__init__(side)
        self.is_open = False
        """A round is under way: the reference and the parameters differ by its steps."""
        self.is_ahead = False
        """The result of the round before is in flight: this round's steps are added to it."""
        self.has_data = True
        """Whether the newest round has made all of its steps."""

    def carries(self) -> bool:
        return self.is_ahead

    def before(self, lo: int, hi: int) -> None:
        if not self.is_open:
            self.vector = None
        super().before(lo, hi)

    def steps(self, count: int, *, in_portion: bool = False) -> Steps:
        """Make a round's steps, as `local_steps`. Returns their samples; 0 if they diverge, and
        none of them counts.

        Then this replica's parameters are useless, and so are slices of a mean that have been
        placed: they contain steps that are dropped here. So no step follows until all slices were
        fetched again.
        """
        assert not self.is_open, "`Rounds.steps` is called once a round: `end` or `close` it first"
        if self.vector is None:
            self.vector = copy_of(self.side.parameters)
        self.is_open, made = True, StepsMade(0, 0, is_diverged=True)
        while made.is_diverged:
            made = yield from local_steps(count, in_portion=in_portion)
            if made.is_diverged and (made.steps or self.is_ahead):
                self.is_open = False
                return 0
        self.has_data = made.has_data
        return made.samples

    def close(self) -> None:
        """The round is over; what it has come to does not count, unless `end` was called."""
        self.is_open = False

    def end(self) -> bool:
        """Add the displacement, reference - parameters, to the residual. Returns whether the sum is
        finite; else it is dropped. A residual that is itself not finite was restored from a
        checkpoint like this: no round would ever count with it, so it is reset.
        """
        side, moved = self.side, self.vector
        self.vector, self.is_open = None, False
        assert moved is not None
        moved -= side.parameters
        if side.has_residual():
            moved += side.residual
        if is_finite(moved):
            side.residual = moved
            return True
        if side.has_residual() and not is_finite(side.residual):
            side.residual = None
        return False
