"""All-reduce: synchronous SGD without servers. Goyal et al., "Accurate, Large Minibatch SGD",
2017, section 4; torch's DistributedDataParallel (Li et al., VLDB 2020) and its hooks.

Every replica has the whole model and its own optimiser. All replicas sum their gradients, and make
the same step:

    w_{t+1} = inner(w_t, sum_i n_i g_i / sum_i n_i)          n_i: samples of replica i

which is `sync` with the optimiser in the replicas. The sum is bit-identical in all replicas, and so
are their models, if their processors are alike. `hook` changes what is summed, as torch's hook of
that name does:

    fp16, bf16        n_i g_i / n, in half the bits
    powersgd          products of narrow matrices, after `powersgd_after_steps` (powersgd.py)
    post-local-sgd    after `local_after_steps`, replicas step along their own gradients, and every
                      `local_steps` steps continue from the mean of their models. Lin et al., "Don't
                      Use Large Mini-Batches, Use Local SGD", ICLR 2020, algorithm 2

- torch.distributed computes the sums: by NCCL if each replica has a GPU of its own (not a part of
  one, MIG) and all have the same NCCL, else by gloo in host memory. NCCL needs room for one more
  vector on the GPU. If it fails when a group forms, the replicas use gloo from then on. The tests
  run gloo on real processes; NCCL has not been run, only what chooses, waits for and aborts it.
- If a member dies, the group re-forms without it, and restarts the sum with the survivors' vectors;
  no step is lost or made twice.
- A replica that joins takes part in its first sum without a gradient, and then receives the model,
  the optimiser's state and the progress of the run, in one more sum. So does a replica that resumes
  from an older checkpoint than the others.
- The rate of a step is summed along with the gradient: it is the mean of all replicas' current
  rates. So `dlctl set inner_lr` may reach them at different steps.
- A replica without data takes part with nothing, so that the others do not wait for it.
- A sum that is not finite is skipped by all replicas.
- The optimiser's state is its state for each parameter. Other state, as numbers in its groups, is
  not transferred to a replica that joins.
- Buffers of a model, as of a BatchNorm, are local to each replica, as in torch without a broadcast.
- In the mean of models all replicas that have made steps have equal weights, as in torch.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Le

from dlctl.algorithms.base import Fault, Method, Needs, ReplicaSide, Shape, Start
from dlctl.algorithms.methods.powersgd import PowerSgd
from dlctl.algorithms.needs import (
    Collective,
    Done,
    Gradient,
    NextData,
    OwnState,
    OwnStep,
    Step,
    Summed,
    passed_on,
)
from dlctl.job.config import Choice, JobFile
from dlctl.job.inner import NONE
from dlctl.model.vector import Vector, all_finite, copy_into, to_host
from dlctl.wire.messages import Array

DIGIT = 2**20
"""The number of samples is transferred as two float32, which are exact up to 2**24."""
SUMS, SECOND, HANDED_ON = 3, 1, 2
"""A sum is numbered by its step, times `SUMS`, plus `SECOND` if it is the second of two, or
`HANDED_ON` if it transfers the state.
"""
NOTHING = np.zeros(0, np.float32)
HALVES: dict[str, Literal["float16", "bfloat16"]] = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(slots=True, kw_only=True)
class Options:
    hook: Literal["none", "fp16", "bf16", "powersgd", "post-local-sgd"] = "none"
    """What is summed instead of whole gradients, as by torch's hook of that name."""
    powersgd_rank: Annotated[int, Ge(1), Le(64)] = 1
    """Columns of the narrow matrices."""
    powersgd_after_steps: Annotated[int, Ge(0)] = 1000
    """Steps with whole gradients, before they are compressed."""
    local_after_steps: Annotated[int, Ge(0)] = 100
    """Steps along the mean gradient, before replicas step along their own."""
    local_steps: Annotated[int, Ge(1)] = 4
    """Steps from one mean of the models to the next, once replicas step along their own gradients.
    """


class StepSum(NamedTuple):
    """The result of the sums of one step."""

    newest: Summed
    mean: Array | None
    """float32[d], the gradient; None: there is none."""
    is_counted: bool
    """Whether this replica's gradient is in the sum."""
    joined: int


class Replica(ReplicaSide):
    averages = True
    options: Options

    def begin(self, start: Start) -> None:
        self.step = self.samples = 0
        self._meets = start != "new"
        """The others may be further ahead: the first sum is without a gradient."""
        self._uncounted: Step | None = None
        """A gradient that was not in the last sum: it goes into the next one."""
        self._mean: Array | None = None
        """The mean gradient of the newest sum that contained a gradient of this replica."""
        self._low_rank: PowerSgd | None = None
        if self.options.hook == "powersgd":
            self._low_rank = PowerSgd(self.layout, self.options.powersgd_rank)

    def state(self) -> dict[str, Vector]:
        state = {"progress": np.array([self.step, self.samples], np.float64)}
        if self._low_rank is None:
            return state
        return state | {"error": self._low_rank.error, "q": self._low_rank.q}

    @classmethod
    def state_after(cls, steps: int, samples: int) -> dict[str, Array]:
        return {"progress": np.array([steps, samples], np.float64)}

    def restore(self, state: Mapping[str, Array]) -> None:
        self.step, self.samples = (int(number) for number in state["progress"])
        low_rank = self._low_rank  # With another rank than before, it starts over.
        if low_rank is not None and "q" in state and state["q"].size == low_rank.q.size:
            low_rank.error, low_rank.q = state["error"], state["q"]

    def run(self) -> Needs:
        while True:
            has_data = (yield NextData()) is not None
            is_local = self.options.hook == "post-local-sgd"
            if is_local and self.step >= self.options.local_after_steps:
                sums = yield from self._local_steps(has_data)
            else:
                sums = yield from self._common_step(has_data)
            self.step = sums.newest.step // SUMS + 1
            if sums.joined:
                yield from self._pass_on(sums)

    # ------------------------------------------------------------ one step of all

    def _common_step(self, has_data: bool) -> Generator[Any, Any, StepSum]:
        computed, self._uncounted = self._uncounted, None
        if computed is None and has_data and not self._meets:
            computed = yield Gradient(sums=self.options.hook == "none")
        self._meets = False
        sums: StepSum = yield from self._sum(computed)
        if sums.is_counted and sums.mean is not None:
            self.samples += round(sums.newest.weight)
            if all_finite(sums.mean):
                yield OwnStep(sums.mean, sums.newest.beside, wait=False)
        if computed is not None and not sums.is_counted:
            self._uncounted = computed
        elif computed is not None:
            yield Done()
        return sums

    def _sum(self, computed: Step | None) -> Generator[Any, Any, StepSum]:
        """Sum the gradients of all replicas. computed: this replica's; None: it adds nothing."""
        gradient = NOTHING if computed is None else to_host(computed.gradient)
        if gradient.size and (low_rank := self._low_rank_at(self.step)) is not None:
            gradient = low_rank.first(gradient)
        summed: Summed = yield self._collective(gradient, computed, self.step * SUMS)
        mean = self._mean_of(summed, computed)
        low_rank = None if summed.step % SUMS else self._low_rank_at(summed.step // SUMS)
        if low_rank is None or mean is None:
            return StepSum(summed, mean, summed.is_counted, summed.joined)
        # A replica that has just joined takes part in the second sum, too, with nothing.
        is_in = bool(gradient.size) and summed.is_counted
        narrow = low_rank.second(mean, takes_part=is_in)
        second: Summed = yield self._collective(
            narrow, computed if is_in else None, summed.step + SECOND
        )
        is_counted, joined = summed.is_counted and second.is_counted, summed.joined + second.joined
        if not (is_counted and second.weight):
            return StepSum(second, None, is_counted, joined)
        mean = to_host(second.vector) / np.float32(second.weight)
        return StepSum(second, low_rank.commit(mean, is_counted=is_in), is_counted, joined)

    def _mean_of(self, summed: Summed, computed: Step | None) -> Array | None:
        """float32[d], the mean gradient; None: no replica had one. It reuses the memory of the mean
        before if this replica computed its gradient after the step along that.
        """
        if not summed.weight:
            return None
        if computed is None or self._mean is None or self._mean.size != summed.vector.size:
            self._mean = np.empty(summed.vector.size, np.float32)
        return np.divide(to_host(summed.vector), np.float32(summed.weight), out=self._mean)

    def _low_rank_at(self, step: int) -> PowerSgd | None:
        return self._low_rank if step >= self.options.powersgd_after_steps else None

    def _collective(self, vector: Array, computed: Step | None, step: int) -> Collective:
        samples = 0 if computed is None else computed.samples
        return Collective(
            vector=vector, weight=samples, step=step, beside=self.own_rate(self.samples),
            dtype=HALVES.get(self.options.hook, "float32"), given=True,
        )  # fmt: skip

    # ------------------------------------------------------------ steps of one's own

    def _local_steps(self, has_data: bool) -> Generator[Any, Any, StepSum]:
        """Local steps, and then the mean of all models."""
        samples = 0
        for _ in range(self.options.local_steps if has_data and not self._meets else 0):
            step: Step | None = yield Gradient(step=True, gather=False)
            if step is None:
                break
            samples += step.samples
        self._meets = False
        summed: Summed = yield Collective(
            vector=self.parameters, weight=float(samples > 0), step=self.step * SUMS, beside=samples
        )
        if summed.is_counted and summed.weight:
            mean = to_host(summed.vector) / np.float32(summed.weight)
            if all_finite(mean):
                copy_into(self.parameters, mean)
            self.samples += round(summed.beside * summed.weight)
            if samples:
                yield Done()
        return StepSum(summed, None, summed.is_counted, summed.joined)

    # ------------------------------------------------------------ replicas that join

    def _pass_on(self, sums: StepSum) -> Needs:
        """Transfer the state of the group to the replicas that have joined."""
        kept: Array = yield OwnState()
        place, q = divmod(self.samples, DIGIT), NOTHING
        if self._low_rank is not None:
            q = self._low_rank.q
        whole = np.concatenate([to_host(self.parameters), place, q, kept], dtype=np.float32)
        step = (self.step - 1) * SUMS + HANDED_ON
        whole, step = yield from passed_on(whole, self.slot, step, sums.newest)
        if sums.is_counted:
            return
        ends = np.cumsum([len(self.parameters), len(place), q.size])
        model, (high, low), q, kept = np.split(whole, ends)
        self.step, self.samples = step // SUMS + 1, int(high) * DIGIT + int(low)
        if self._low_rank is not None:
            self._low_rank.q = q
        # Before the model: some optimisers allocate their state only by making a step.
        yield OwnState(kept)
        copy_into(self.parameters, model)


def check(job: JobFile) -> list[Fault]:
    """Replicas need an optimiser; with local steps there is no common gradient to clip."""
    found: list[Fault] = []
    if job.inner.name == NONE:
        what = "allreduce steps with the replicas' own optimiser"
        found.append((("inner", "name"), what, 'use "adamw"'))
    is_local = job.algorithm.options.get("hook") == "post-local-sgd"
    if is_local and job.gradient.clip == "global" and job.gradient.clip_norm:
        what = "post-local-sgd steps along the gradients of single replicas"
        found.append((("gradient", "clip"), what, 'use clip = "replica"'))
    return found


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
