"""A sum over a group that begins while the gradient is still being computed, part by part, as in
torch's DistributedDataParallel. Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3.

The flat gradient is cut into parts, which all members sum in the same order: from the end, which a
backward pass reaches first. The sum of a part starts as soon as all its parameters have gradients,
at the latest at the end of the pass, because a parameter may get none. Nothing blocks here. The
members exchange what they have started when they meet (`replica_group.py`); if one of them has
discarded the gradient it was summing, the sum is useless. The gradient itself is not modified: it
is needed in that case, and when the group re-forms after a member has died.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlctl.wire.messages import Array

PARTS = 4
"""The parts that a small model is cut into: the step waits for the sum of the last part only."""
PART_MIN, PART_MAX = 1 << 18, 6_250_000
"""Elements: 1 MB, below which latency dominates a sum, and 25 MB; as in torch."""
LOOKED_AT = 4
"""Parameters with a hook, from the front of a part: those of a layer or two."""


def cuts(size: int) -> list[slice]:
    """The parts of a vector in the order of their sums. They depend on its size alone, so all
    members have the same.
    """
    part = min(max(-(-size // PARTS), PART_MIN), PART_MAX)
    return [slice(max(hi - part, 0), hi) for hi in range(size, 0, -part)]


class EarlySum:
    """The part of its next sum that a member has started."""

    def __init__(self, start: Callable[[Tensor], Any], summed: Tensor, weight: float) -> None:
        """start: starts the sum of a tensor over the group, in place. summed: float32[d], receives
        the sum. weight: of this member.
        """
        self.weight = weight
        self.summed = summed
        self.cuts = cuts(len(summed))
        self.works: list[Any] = []
        """The operations of torch, one for each started part."""
        self.is_void = False
        """This member has discarded the gradient whose sum it had started."""
        self.error: Exception | None = None
        self._gradient = 0
        """The address of the gradient in memory."""
        self._start = start

    def begin(self, gradient: Tensor) -> None:
        """Start the next part of float32[d]. Raises nothing: `wait` raises the error."""
        where = self.cuts[len(self.works)]
        self._gradient = gradient.data_ptr()
        part = self.summed[where]
        # Zero times NaN or infinity is not zero.
        torch.mul(gradient[where], self.weight, out=part) if self.weight else part.zero_()
        work = None
        try:
            work = self._start(part) if self.error is None else None
        except Exception as error:
            self.error = error
        self.works.append(work)

    def begin_rest(self, gradient: Tensor) -> None:
        """Start all remaining parts."""
        while len(self.works) < len(self.cuts):
            self.begin(gradient)

    def is_of(self, vector: Array, weight: float) -> bool:
        """Whether this is the sum of that vector with that weight."""
        at = vector.__array_interface__["data"][0]
        return not self.is_void and self.weight == weight and self._gradient == at

    def wait(self, wait: Callable[[Any], None]) -> None:
        """Wait until all parts are summed. Raises whatever gloo raises."""
        if self.error is not None:
            raise self.error
        for work in self.works:
            wait(work)

    def free(self) -> None:
        """Release the started operations, which keep connections open, as the group is gone. Called
        in another thread.
        """
        for number in range(len(self.works)):
            self.works[number] = None


BeginSum = Callable[[int, float], EarlySum | None]
"""Elements and weight of a gradient -> its sum; None: there is no group."""


_State = tuple[int, int]
"""The id and version of a parameter's gradient tensor; 0, 0: there is none."""


def _state(parameter: nn.Parameter) -> _State:
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


class GradientParts:
    """Watches a backward pass, and starts the sum of each part when all its gradients exist.

    A hook on each parameter would cost more than it gains, so only the few parameters that should
    be last in each part have one. A gradient that changes after its sum was started, as that of a
    parameter used in several checkpoints, is detected at the end of the pass; from then on no sum
    starts before that.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        bounds: Sequence[tuple[int, int]],
        gather: Callable[[Sequence[int]], Tensor],
    ) -> None:
        """bounds: of each parameter in the flat vector. gather: copies the gradients of these
        parameters, by number, into the flat gradient, zeros for a missing one, and returns it.
        """
        self._parameters, self._gather = parameters, gather
        self._parts = [
            [n for n, (lo, hi) in enumerate(bounds) if lo < cut.stop and cut.start < hi]
            for cut in cuts(bounds[-1][1])
        ]
        """The numbers of the parameters in each part."""
        self._early: EarlySum | None = None
        self._before: list[_State] = []
        """The state of each gradient before the pass: it may be of earlier batches."""
        self._begun: dict[int, _State] = {}
        """Number of a parameter in a started part -> the state of its gradient."""
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
        """The pass is over: start the remaining parts. Returns the flat gradient."""
        early, self._early = self._early, None
        assert early is not None
        if any(_state(self._parameters[n]) != begun for n, begun in self._begun.items()):
            early.is_void, self._may_begin = True, False
            self._begun.clear()
        whole = self._gathered(range(len(self._parameters)))
        early.begin_rest(whole)
        self._begun.clear()
        return whole
