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
from typing import Any

import torch
from torch import Tensor, nn

from dlctl.messages import Array

PARTS = 4
"""Of a small model: the sum of the last one is all that is waited for."""
PART_MIN, PART_MAX = 1 << 18, 6_250_000
"""Elements: 1 MB, for less of them a sum is all latency, and 25 MB; as in torch."""
LOOKED_AT = 4
"""Parameters of a part, from its front: those of a layer or two."""


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


_State = tuple[int, int]
"""Of a parameter's gradient: which one it is, and how often it has been written to; 0, 0: none."""


def _state(parameter: nn.Parameter) -> _State:
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


class GradientParts:
    """Looks at a backward pass now and then, and begins each part of its sum when all gradients in
    it have come.

    To look at each parameter would take longer than there is to win, so it is done at the few that
    should come last in each part. What has changed since its part was begun is found in the end, as
    that of a parameter which is used in several checkpoints: from then on nothing is begun before.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        bounds: Sequence[tuple[int, int]],
        gather: Callable[[Sequence[int]], Tensor],
    ) -> None:
        """bounds: of each parameter in the flat vector. gather: puts the gradients of parameters,
        by number, into the flat gradient, zeros where there is none, and returns that.
        """
        self._parameters, self._gather = parameters, gather
        self._parts = [
            [n for n, (lo, hi) in enumerate(bounds) if lo < cut.stop and cut.start < hi]
            for cut in cuts(bounds[-1][1])
        ]
        """The parameters in each."""
        self._early: EarlySum | None = None
        self._before: list[_State] = []
        """Of all parameters: there may be gradients of other batches."""
        self._begun: dict[int, _State] = {}
        """Of those whose parts are begun."""
        self._may_begin = True
        for number in {number for part in self._parts[:-1] for number in part[:LOOKED_AT]}:
            parameters[number].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._look
            )

    def watch(self, early: EarlySum) -> None:
        """The next backward pass is the last one of this gradient."""
        self._early = early
        self._before = [*map(_state, self._parameters)]

    def _look(self, _: Tensor) -> None:
        early = self._early
        if early is None or not self._may_begin:
            return
        for part in self._parts[len(early.works) : -1]:
            if any(_state(self._parameters[n]) == self._before[n] for n in part):
                return
            early.begin(self._gathered(part))

    def _gathered(self, part: Sequence[int]) -> Tensor:
        new = [number for number in part if number not in self._begun]
        self._begun |= {number: _state(self._parameters[number]) for number in new}
        return self._gather(new)

    def end(self) -> Tensor:
        """The pass is over: begin what is left. Returns the flat gradient."""
        early, self._early = self._early, None
        assert early is not None
        if any(_state(self._parameters[n]) != begun for n, begun in self._begun.items()):
            early.is_void, self._may_begin = True, False
            self._begun.clear()
        whole = self._gathered(range(len(self._parameters)))
        early.begin_rest(whole)
        self._begun.clear()
        return whole
