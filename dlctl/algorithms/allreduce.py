"""All-reduce: synchronous SGD without servers. Goyal et al., "Accurate, Large Minibatch SGD",
2017, section 4; torch's DistributedDataParallel (Li et al., VLDB 2020).

Every replica has the whole model and an optimiser of its own. All sum their gradients, and make the
same step:

    w_{t+1} = inner(w_t, sum_i n_i g_i / sum_i n_i)          n_i: samples of replica i

which is `sync` with the optimiser in the replicas. The sum has the same bits for all of them, and
so has what they make of it, if their processors are alike: they do not differ.

- torch.distributed makes the sums (gloo). If a member dies, the group is made anew without it, and
  the sum is begun again of what the living have given; no step is lost or made twice.
- Who joins takes part in its first sum without a gradient, and is then handed the model, what the
  optimiser keeps, and how far the run is, in one more sum. So is who goes on from a checkpoint that
  is older than the others'.
- The rate of a step is part of the sum: the mean of what all have in force. So `dlctl set
  inner_lr` may reach them at different steps.
- A replica without data takes part with nothing, so that nobody waits for it.
- A sum that is not finite is left out by all of them.
- What an optimiser keeps is its state for each parameter. One that keeps more, as numbers in its
  groups, begins with these anew in who joins.
- Buffers of a model, as of a BatchNorm, are each replica's own, as in torch without a broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dlctl.algorithms.base import Fault, Method, Needs, ReplicaSide, Shape, Start
from dlctl.algorithms.needs import (
    Collective,
    Done,
    Gradient,
    NextData,
    OwnState,
    OwnStep,
    Step,
    Summed,
    handed_on,
)
from dlctl.config import Choice, JobFile
from dlctl.inner import NONE
from dlctl.messages import Array
from dlctl.vector import Vector, all_finite, copy_into, to_host

DIGIT = 2**20
"""Samples are handed on as two float32, which are exact up to 2**24."""


@dataclass(slots=True, kw_only=True)
class Options:
    pass


class Replica(ReplicaSide):
    options: Options

    def begin(self, start: Start) -> None:
        self.step = self.samples = 0
        self._meets = start != "new"
        """The others may be further: its first sum is without a gradient."""
        self._uncounted: Step | None = None
        """What the last sum was without: it is brought to the next one."""

    def state(self) -> dict[str, Vector]:
        return {"progress": np.array([self.step, self.samples], np.float64)}

    def restore(self, state: Mapping[str, Array]) -> None:
        self.step, self.samples = (int(number) for number in state["progress"])

    def run(self) -> Needs:
        while True:
            data = yield NextData()
            computed, self._uncounted = self._uncounted, None
            if computed is None and data is not None and not self._meets:
                computed = yield Gradient()
            self._meets = False
            samples = 0 if computed is None else computed.samples
            vector = self._brought(computed)
            summed: Summed = yield Collective(vector=vector, weight=samples, step=self.step)
            if summed.is_counted and summed.weight:
                yield from self._make_step(summed)
            self.step = summed.step + 1
            if summed.joined:
                yield from self._hand_on(summed)
            if samples and summed.is_counted:
                yield Done()
            elif samples:
                self._uncounted = computed

    def _brought(self, computed: Step | None) -> Array:
        """float32[d + 1]: the gradient, and the rate."""
        brought = np.zeros(len(self.parameters) + 1, np.float32)
        if computed is not None:
            assert computed.gradient is not None
            brought[:-1] = to_host(computed.gradient)
            brought[-1] = self.own_rate(self.samples)
        return brought

    def _make_step(self, summed: Summed) -> Needs:
        mean = to_host(summed.vector) / np.float32(summed.weight)
        self.samples += round(summed.weight)
        if all_finite(mean):
            yield OwnStep(mean[:-1], float(mean[-1]))

    def _hand_on(self, summed: Summed) -> Needs:
        """Of who has joined it is what the others have come to that counts."""
        kept: Array = yield OwnState()
        place = divmod(self.samples, DIGIT)
        whole = np.concatenate([to_host(self.parameters), place, kept], dtype=np.float32)
        whole, self.step = yield from handed_on(whole, self.slot, self.step, summed)
        size = len(self.parameters)
        high, low = (int(digit) for digit in whole[size : size + 2])
        self.samples = high * DIGIT + low
        # First, for an optimiser may have to make a step to have a state at all.
        yield OwnState(whole[size + 2 :])
        copy_into(self.parameters, whole[:size])


def check(job: JobFile) -> list[Fault]:
    """Somebody has to make the steps."""
    if job.inner.name != NONE:
        return []
    return [(("inner", "name"), "allreduce steps with the replicas' own optimiser", 'use "adamw"')]


ALLREDUCE = Method(
    Options=Options,
    replica=Replica,
    shape=Shape(
        tables=(),
        model="replica",
        links=frozenset({"group"}),
        survives=frozenset({"worker", "coordinator"}),
    ),
    inner=Choice(name="sgd", options={"lr": 0.01}),
    check=check,
)
