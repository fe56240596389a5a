"""K-FAC: SGD along the natural gradient, by Kronecker factors of the Fisher matrix that all
replicas sum. Martens and Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate
Curvature", ICML 2015; Grosse and Martens, 2016, for convolutions; distributed as in Pauloski et
al., "Convolutional Neural Network Training with Distributed K-FAC", SC 2020 (arXiv 2007.00784).

Every replica has the whole model and its own optimiser, as with `allreduce`. Of a layer with inputs
a (with a 1 appended if it has a bias) and gradients g at its outputs, over all rows of a step of n
samples, and with the gradient V of its weight and bias as one matrix:

    each `factor_steps`:  A += (1 - xi) (sum a a^T / rows - A)      xi = `factor_decay`
                          G += (1 - xi) (n sum g g^T - G)           A, G: identities at first
    each `eigen_steps`:   A = QA dA QA^T,  G = QG dG QG^T           eigenvalues below 1e-10 are 0
    every step:           P = QG [(QG^T V QA) / (dG dA^T + gamma)] QA^T          gamma = `damping`
                          nu = min(1, sqrt(kappa / |sum lr^2 P.V|))              kappa = `kl_clip`
                          w = inner(w, nu P)

P is (G (x) A + gamma I)^-1 V, exactly. nu is one number, with the sum over all layers. The sums of
a a^T and g g^T are weighted by the replicas' samples: G is that of the joint batch, and so is A if
all samples have as many rows.

`placement` says who computes what:

    opt    a side of a layer has an owner, which computes its eigenvectors; all replicas sum them,
           which share them, and each one computes P by itself (the paper's K-FAC-opt)
    lw     a layer has an owner, which keeps its eigenvectors and computes P; all replicas sum P in
           every step (K-FAC-lw)

The owners are chosen by a^3 + g^3, the most expensive layer first; the two sides of a layer have
different owners if there are more replicas than layers. `lw` computes less in each replica, and
`opt` sends less if `eigen_steps` is large.

- Layers are Linear and Conv2d (with dilation and all padding modes), and Embedding with
  `embeddings = true`, for which A is a diagonal: the frequency of each token. All else is stepped
  along its gradient as it is, outside of nu: norms, convolutions with groups, tied weights,
  parametrized and frozen ones, layers that `skip` names, and those whose forward pass is never
  called, as in nn.MultiheadAttention. The log of worker-0 says which.
- A side longer than `max_dim` has the identity instead of a factor: an eigendecomposition costs the
  third power of it.
- G is that of the paper's own code, with n sum g g^T, the Fisher matrix of the mean loss. The loss
  of a language model is a mean of more terms than samples: there `damping` counts as much more.
- The first factor is 1 - xi of the step's own and xi of the identity.
- `gradient.accumulate` makes no difference: a, g of all batches of a step are summed. Weights that
  the task's loss returns are in g. A module that is called twice in a step gives more rows.
- A batch is recorded only on factor steps, in training mode. The memory of its inputs is held until
  its backward pass, also where checkpointing would free it.
- With fp16 the gradients are divided by the loss scale; a batch that overflows is not recorded.
- If a member dies, its group re-forms and the sum is repeated. If an owner dies, its eigenvectors
  are missing in the sum, which all others see: they choose owners for these sides again, and repeat
  the sum. With `lw` the new owners decompose the factors as they are then.
- A replica that joins receives the model, the optimiser's state, the factors, with `opt` the
  eigenvectors, and the progress of the run, in one more sum. They are in checkpoints, too.
- A sum of factors that is not finite is skipped by all replicas, as is a sum of gradients.
- `damping`, `factor_decay` and `kl_clip` change live: replicas use their mean over the replicas, as
  of the newest factor step. So they are equal in all, as the rate is.
- All replicas compute P alike, and have one model, if their processors are alike; with `lw` they
  need not be, but for nu.
- With clip = "global" nu P is clipped. Buffers are local to each replica.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from dlctl.algorithms.base import Fault, Method, Needs, ReplicaSide, Shape, Start
from dlctl.algorithms.methods.kfac_shapes import SIDES, Packing, assigned, at_most, reassigned
from dlctl.algorithms.needs import (
    Collective,
    Done,
    Engine,
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
from dlctl.job.settings import Live
from dlctl.model.flat import Layout
from dlctl.model.vector import Vector, all_finite, copy_into, to_host
from dlctl.wire.messages import Array, Json

DIGIT = 2**20
"""The number of samples is transferred as two float32, which are exact up to 2**24."""
PHASES = 5
GRADIENT, FACTORS, EIGENS, UPDATES, HANDED_ON = range(PHASES)
"""A sum is numbered by its step, times `PHASES`, plus what it is of."""
OVER = -1
"""After the last sum of a step."""
NOTHING = np.zeros(0, np.float32)


@dataclass(slots=True, kw_only=True)
class Options:
    placement: Literal["opt", "lw"] = "opt"
    """opt: replicas share the eigenvectors, and each computes all of the preconditioned gradient.
    lw: each computes that of its own layers, and they share it in every step."""
    factor_steps: Annotated[int, Ge(1)] = 10
    """Steps from one sum of the factors to the next."""
    eigen_steps: Annotated[int, Ge(1)] = 100
    """Steps from one eigendecomposition to the next, a multiple of `factor_steps`."""
    damping: Live[Annotated[float, Gt(0)]] = 0.001
    """gamma, added to all eigenvalues of the Fisher matrix."""
    factor_decay: Live[Annotated[float, Ge(0), Lt(1)]] = 0.95
    """xi, the part of the factors that stays when new ones are summed."""
    kl_clip: Live[Annotated[float, Ge(0)]] = 0.001
    """kappa: the largest change of the model's output by a step, as its approximate KL divergence;
    0: no limit."""
    embeddings: bool = False
    """Also precondition Embedding layers."""
    skip: tuple[str, ...] = ()
    """Names of layers that are stepped along their gradients as they are; * and ? stand for any
    characters: ["head", "blocks.*.gate"]."""
    max_dim: Annotated[int, Ge(1), Le(100_000)] = 4096
    """The longest side of a layer that has a factor. A longer one has the identity."""


@dataclass(slots=True)
class OneStep:
    """One step of all replicas, while it is made."""

    computed: Step | None
    """The gradient of this replica; None: it adds nothing."""
    is_recorded: bool
    """The engine has recorded its batch."""
    number: int
    """The step."""
    is_in: bool = True
    """This replica has taken part in all sums as one that has the group's state."""
    is_counted: bool = False
    """Its gradient is in the sum."""
    joined: int = 0
    mean: Array | None = None
    """float32[d], the gradient; None: no replica had one, or it is not finite."""
    rate: float = 0.0
    updates: Array = field(default_factory=lambda: NOTHING)
    newest: Summed | None = None

    def note(self, summed: Summed) -> None:
        self.newest, self.number = summed, summed.step // PHASES
        self.is_in = self.is_in and summed.is_counted
        self.joined += summed.joined


class Replica(ReplicaSide):
    averages = True
    options: Options

    def begin(self, start: Start) -> None:
        self.step = self.samples = 0
        self._meets = start != "new"
        """The others may be further ahead: the first sum is without a gradient."""
        self._uncounted: Step | None = None
        """A gradient that was not in the last sum: it goes into the next one."""
        self._costs = np.zeros((0, SIDES))
        """float64[layers, 2], of the eigendecompositions."""
        self._owners = np.zeros((0, SIDES), np.int64)
        """Layer, side -> slot. The same in all replicas that have the state of the group."""
        self._engine_size = 0
        """Elements of what the engine hands on."""
        self._numbers: Array = np.array(self._own_numbers(), np.float32)
        """damping, factor_decay and kl_clip, on which all replicas agree."""
        self._mean = NOTHING
        self._nu = 1.0

    def _own_numbers(self) -> tuple[float, float, float]:
        options = self.options
        return options.damping, options.factor_decay, options.kl_clip

    def state(self) -> dict[str, Vector]:
        return {
            "progress": np.array([self.step, self.samples], np.float64),
            "owners": self._owners.astype(np.float64),
            "numbers": self._numbers,
        }

    @classmethod
    def state_after(cls, steps: int, samples: int) -> dict[str, Array]:
        return {"progress": np.array([steps, samples], np.float64)}

    def restore(self, state: Mapping[str, Array]) -> None:
        self.step, self.samples = (int(number) for number in state["progress"])
        if "owners" in state:
            self._owners = state["owners"].astype(np.int64)
        if "numbers" in state and np.allclose(state["numbers"], self._numbers, rtol=1e-6):
            self._numbers = state["numbers"]  # The job file has no others: as a sum has rounded.

    def figures(self) -> Json:
        return {"layers": len(self._costs), "kl_factor": round(self._nu, 6)}

    def run(self) -> Needs:
        costs, sizes = yield Engine(op="describe")
        self._costs, self._engine_size = costs, int(sizes[0])
        if self._owners.shape != costs.shape:
            self._owners = np.full(costs.shape, -1, np.int64)
        if self.options.placement == "lw":  # With the other one, the sides may have been apart.
            self._owners[self._owners[:, 0] != self._owners[:, 1]] = -1
        while True:
            has_data = (yield NextData()) is not None
            step: OneStep = yield from self._computed(has_data)
            yield from self._sums(step)
            yield from self._step_along(step)
            self.is_in_step = False
            if step.computed is not None and step.is_counted:
                yield Done()
            elif step.computed is not None:
                self._uncounted = step.computed
            if step.joined:
                yield from self._pass_on(step)

    # ------------------------------------------------------------ one step of all

    def _computed(self, has_data: bool) -> Generator[Any, Any, OneStep]:
        """Compute the gradient of this replica."""
        kept, self._uncounted = self._uncounted, None
        if kept is not None or not has_data or self._meets:
            return OneStep(kept, False, self.step)
        is_recorded = self.step % self.options.factor_steps == 0
        if is_recorded:
            yield Engine(op="record")
        computed: Step | None = yield Gradient(sums=True)
        return OneStep(computed, is_recorded and computed is not None, self.step)

    def _sums(self, step: OneStep) -> Needs:
        """All sums of a step, in an order that follows from its number and from the sums alone. So
        a replica that has just joined, perhaps in the midst of them, makes the same ones.
        """
        phase = GRADIENT
        while phase != OVER:
            vector, weight = NOTHING, 0.0
            if step.is_in:
                vector, weight = yield from self._given(phase, step)
            summed: Summed = yield Collective(
                vector=vector, weight=weight, step=step.number * PHASES + phase,
                beside=self.own_rate(self.samples), given=True,
            )  # fmt: skip
            self._meets = False
            step.note(summed)
            phase = yield from self._taken(summed.step % PHASES, summed, step)

    def _given(self, phase: int, step: OneStep) -> Generator[Any, Any, tuple[Array, float]]:
        """The vector of this replica in a sum, and its weight."""
        samples = 0.0 if step.computed is None else float(step.computed.samples)
        if phase == GRADIENT:
            gradient = NOTHING if step.computed is None else to_host(step.computed.gradient)
            return gradient, samples
        if phase == FACTORS:
            if not step.is_recorded:
                return NOTHING, 0.0
            (factors,) = yield Engine(op="factors")
            return np.concatenate([self._own_numbers(), factors], dtype=np.float32), samples
        mine = (self._owners == self.slot).astype(np.uint8)
        if phase == EIGENS:
            (eigens,) = yield Engine(op="eigens", arrays=(mine,))
            return eigens, 1.0
        assert step.mean is not None
        (updates,) = yield Engine(op="updates", arrays=(step.mean, mine, self._terms(step)))
        return updates, 1.0

    def _taken(self, phase: int, summed: Summed, step: OneStep) -> Generator[Any, Any, int]:
        """What a sum is good for. Returns the phase of the next one."""
        if phase == GRADIENT:
            return (yield from self._take_gradient(summed, step))
        if phase == FACTORS:
            return (yield from self._take_factors(summed, step))
        if phase == HANDED_ON:
            return OVER
        given = to_host(summed.vector)[: self._costs.size].reshape(self._costs.shape)
        if step.is_in and phase == EIGENS:
            yield Engine(op="take_eigens", arrays=(to_host(summed.vector),))
        if (given == 1).all():
            step.updates = to_host(summed.vector)
            return OVER
        if step.is_in:
            self._owners = reassigned(
                self._owners, given, self._costs, summed.current, whole=self._is_by_layers(summed)
            )
        return phase

    def _take_gradient(self, summed: Summed, step: OneStep) -> Generator[Any, Any, int]:
        if not summed.weight:
            step.number -= 1  # Nothing was made.
            return OVER
        mean = self._mean_of(summed)
        if step.is_in:
            self.is_in_step = True
            step.is_counted, step.rate = True, summed.beside
            self.samples += round(summed.weight)
        if not all_finite(mean):
            return OVER
        step.mean = mean
        is_of_factors, is_of_eigens = self._kinds(step.number)
        if is_of_eigens and step.is_in:
            yield Engine(op="renew")
            self._owners = assigned(self._costs, summed.current, whole=self._is_by_layers(summed))
        return FACTORS if is_of_factors else self._after_factors(step)

    def _take_factors(self, summed: Summed, step: OneStep) -> Generator[Any, Any, int]:
        if step.is_in and summed.weight:
            mean = to_host(summed.vector) / np.float32(summed.weight)
            if all_finite(mean):
                numbers = len(self._numbers)
                self._numbers = mean[:numbers].copy()
                yield Engine(op="fold", arrays=(mean[numbers:], self._numbers))
        return self._after_factors(step)

    def _after_factors(self, step: OneStep) -> int:
        if self.options.placement == "lw":
            return UPDATES
        return EIGENS if self._kinds(step.number)[1] else OVER

    def _kinds(self, step: int) -> tuple[bool, bool]:
        """Whether factors are summed in this step, and eigenvectors renewed."""
        return step % self.options.factor_steps == 0, step % self.options.eigen_steps == 0

    def _is_by_layers(self, summed: Summed) -> bool:
        """Whether one member owns both sides of a layer."""
        return self.options.placement == "lw" or len(summed.current) <= len(self._costs)

    def _mean_of(self, summed: Summed) -> Array:
        """float32[d], the mean gradient, in memory that every step reuses."""
        if self._mean.size != summed.vector.size:
            self._mean = np.empty(summed.vector.size, np.float32)
        return np.divide(to_host(summed.vector), np.float32(summed.weight), out=self._mean)

    def _terms(self, step: OneStep) -> Array:
        """float64[3]: gamma, kappa and the rate of the step."""
        damping, _, kl_clip = self._numbers.tolist()
        return np.array([damping, kl_clip, step.rate], np.float64)

    def _step_along(self, step: OneStep) -> Needs:
        if step.is_in and step.mean is not None:
            terms, placement = self._terms(step), self.options.placement
            arrays: tuple[Array, ...] = (step.mean, terms)
            if placement == "lw":
                arrays = (step.mean, step.updates, terms)
            along, nu = yield Engine(op=f"along_{placement}", arrays=arrays)
            self._nu = float(nu[0])
            yield OwnStep(along, step.rate, wait=False)
        self.step = step.number + 1

    # ------------------------------------------------------------ replicas that join

    def _pass_on(self, step: OneStep) -> Needs:
        """Transfer the state of the group to the replicas that have joined."""
        kept: Array = yield OwnState()
        (engine,) = yield Engine(op="give")
        parts = [
            to_host(self.parameters), np.array(divmod(self.samples, DIGIT)), self._numbers,
            self._owners.ravel(), engine, kept,
        ]  # fmt: skip
        assert step.newest is not None
        whole, number = yield from passed_on(
            np.concatenate(parts, dtype=np.float32), self.slot, self.step * PHASES + HANDED_ON,
            step.newest,
        )  # fmt: skip
        if step.is_in:
            return
        ends = np.cumsum([part.size for part in parts[:-1]])
        model, place, numbers, owners, engine, kept = np.split(whole, ends)
        self.step, self.samples = number // PHASES, int(place[0]) * DIGIT + int(place[1])
        self._numbers = numbers
        self._owners = owners.astype(np.int64).reshape(self._owners.shape)
        yield Engine(op="take", arrays=(engine,))
        # Before the model: some optimisers allocate their state only by making a step.
        yield OwnState(kept)
        copy_into(self.parameters, model)


def check(job: JobFile) -> list[Fault]:
    found: list[Fault] = []
    options = job.algorithm.options
    if job.inner.name == NONE:
        what = "kfac steps with the replicas' own optimiser"
        found.append((("inner", "name"), what, 'use "sgd" with a momentum'))
    factors, eigens = (
        options.get(key, getattr(Options(), key)) for key in ("factor_steps", "eigen_steps")
    )
    if eigens % factors:
        what = f"factors that are new every {factors} steps are decomposed every {eigens}"
        instead = f"use a multiple of {factors}"
        found.append((("algorithm", "eigen_steps"), what, instead))
    if job.gradient.compile:
        what = "a compiled model does not show the inputs of its layers"
        found.append((("gradient", "compile"), what, "remove it"))
    return found


def bytes_kept(job: JobFile, layout: Layout) -> int:
    """What the factors and eigenvectors of a replica take at most."""
    options = Options(**job.algorithm.options)
    return Packing(at_most(layout, options.max_dim, options.skip)).bytes_kept()


KFAC = Method(
    Options=Options,
    replica=Replica,
    shape=Shape(
        tables=(),
        model="replica",
        links=frozenset({"group"}),
        engine="daemons.worker.kfac.engine:KfacEngine",
        twin="dlctl.algorithms.methods.kfac_twin:KfacTwin",
        survives=frozenset({"worker", "coordinator"}),
    ),
    inner=Choice(name="sgd", options={"lr": 0.1, "momentum": 0.9}),
    check=check,
    bytes_kept=bytes_kept,
)
