"""A sum over a group that begins while the gradient is still being computed, part by part, as in
torch's DistributedDataParallel. Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3.

The flat gradient is cut into parts, which are summed in one order by all members: from its end,
which a backward pass comes to first. A part is begun as soon as all parameters in it have their
gradients, and at the end of the pass at the latest: a parameter may get none. Nobody waits here;
what has been begun is told when all members meet (`group.py`), and it is of no use then if one of
them has summed what it does not go on with. The gradient itself stays as it is, for that case, and
for the group that is made anew when a member dies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dlctl.messages import Array

PARTS = 4
"""Of a small model: the sum of the last one is all that is waited for."""
PART_MIN, PART_MAX = 1 << 18, 6_250_000
"""Elements: 1 MB, for less of them a sum is all latency, and 25 MB; as in torch."""


def cuts(size: int) -> list[slice]:
    """The parts of a vector in the order in which they are summed; by its size alone, so that they
    are the same for all members.
    """
    part = min(max(-(-size // PARTS), PART_MIN), PART_MAX)
    return [slice(max(hi - part, 0), hi) for hi in range(size, 0, -part)]


class EarlySum:
    """What a member has begun of its next sum."""

    def __init__(self, start: Callable[[Tensor], Any], summed: Tensor, weight: float) -> None:
        """start: begins the sum of a tensor over the group, in place. summed: float32[d], for the
        sum. weight: of this member.
        """
        self.weight = weight
        self.summed = summed
        self.cuts = cuts(len(summed))
        self.works: list[Any] = []
        """One for each part that is begun."""
        self.is_void = False
        """What was begun is not what this member goes on with."""
        self.error: Exception | None = None
        self._gradient = 0
        """Where in memory."""
        self._start = start

    def begin(self, gradient: Tensor) -> None:
        """The next part, of float32[d]. Nothing is raised: who waits for the sum hears of it."""
        where = self.cuts[len(self.works)]
        self._gradient = gradient.data_ptr()
        part = self.summed[where]
        # Zero times what is not finite would not be zero.
        torch.mul(gradient[where], self.weight, out=part) if self.weight else part.zero_()
        work = None
        try:
            work = self._start(part) if self.error is None else None
        except Exception as error:
            self.error = error
        self.works.append(work)

    def begin_rest(self, gradient: Tensor) -> None:
        """All parts that are not begun yet."""
        while len(self.works) < len(self.cuts):
            self.begin(gradient)

    def is_of(self, vector: Array, weight: float) -> bool:
        """Whether it is the sum that is asked for now."""
        at = vector.__array_interface__["data"][0]
        return not self.is_void and self.weight == weight and self._gradient == at

    def wait(self, wait: Callable[[Any], None]) -> None:
        """Until all parts are summed. Raises what gloo does."""
        if self.error is not None:
            raise self.error
        for work in self.works:
            wait(work)

    def let_go(self) -> None:
        """There is another group; from another thread. What is begun holds on to connections."""
        for number in range(len(self.works)):
            self.works[number] = None


BeginSum = Callable[[int, float], EarlySum | None]
"""Elements and weight of a gradient -> its sum, if there is anybody to sum with."""


class GradientParts:
    """Watches a backward pass, and begins each part of its sum when all its gradients have come."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        bounds: Sequence[tuple[int, int]],
        gather: Callable[[Sequence[int]], Tensor],
    ) -> None:
        """bounds: of each parameter in the flat vector. gather: puts the gradients of parameters,
        by number, into the flat gradient, zeros where there is none, and returns that.
        """
        size = bounds[-1][1]
        parts = cuts(size)
        self._gather = gather
        self._parts = [
            [n for n, cut in enumerate(parts) if lo < cut.stop and cut.start < hi]
            for lo, hi in bounds
        ]
        """Of each parameter, in which it is."""
        self._first = [
            [n for n, of in enumerate(self._parts) if of[:1] == [k]] for k in range(len(parts))
        ]
        """Of each part, the parameters that are in none before it."""
        self._in = [sum(k in of for of in self._parts) for k in range(len(parts))]
        self._early: EarlySum | None = None
        for number, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._came, number)
            )

    def watch(self, early: EarlySum) -> None:
        """The next backward pass is the last one of this gradient."""
        self._early = early
        self._missing, self._has_come = [*self._in], [False] * len(self._parts)

    def _came(self, number: int, _: Tensor) -> None:
        early = self._early
        if early is None:
            return
        if self._has_come[number]:  # It has changed since: a checkpoint in the task's model.
            early.is_void = True
            return
        self._has_come[number] = True
        for part in self._parts[number]:
            self._missing[part] -= 1
        while len(early.works) < len(self._missing) and not self._missing[len(early.works)]:
            early.begin(self._gather(self._first[len(early.works)]))

    def end(self) -> Tensor:
        """The pass is over: begin what is left. Returns the flat gradient."""
        early, self._early = self._early, None
        assert early is not None
        left = self._first if early.is_void else self._first[len(early.works) :]
        gradient = self._gather([number for numbers in left for number in numbers])
        early.begin_rest(gradient)
        return gradient
