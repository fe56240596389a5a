"""A rank's part of a replica: what it computes of a step, and what its optimiser steps.

Every rank makes the same calls with its own batches. A step's loss and norm are those of the whole
replica, so all ranks decide alike whether the step is usable.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from daemons.worker import inner_optimizer
from daemons.worker.ranks.model_slices import ModelSlice
from daemons.worker.ranks.rank_memory import FREE, PARAMETERS, STATES, RankMemory, others
from daemons.worker.replica import AUTOCAST, Measured, in_numbers, to_device
from daemons.worker.stepper import CLOSE, Stepped, norm_of, weight_of
from daemons.worker.task.model_tensors import find
from daemons.worker.task.module_modes import Modes
from daemons.worker.task.user_task import LossResult, Task, TaskError, calling
from dlctl.job.config import JobFile, ParameterGroup
from dlctl.model.flat import AVERAGED, TRAINED, Layout
from dlctl.wire.messages import Array

FEW_BYTES = 32 << 20
"""Gradients per optimiser call, in a step in which the optimiser creates its state."""
Weighted = tuple[Any, float]
"""A batch, and its fraction of the step's samples."""
Kept = Mapping[str, Array | int]
"""An optimiser's state by name, as a rank reports it. An int is the number of the vector in the
replica's memory to which all ranks contribute their pieces."""


class RankPart:
    """The model of one rank, with its slices of the parameters."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        layout: Layout,
        pieces: Sequence[ModelSlice],
        memory: RankMemory,
        device: torch.device,
        *,
        rank: int,
        tells: bool,
        precision: str,
    ) -> None:
        """tells: whether this rank reports its losses; False: they repeat those of another rank."""
        self.task, self.model, self.layout = task, model, layout
        self.pieces, self.memory, self.device = pieces, memory, device
        self.rank, self.tells = rank, tells
        self.modes = Modes(task, model)
        self._precision = AUTOCAST[precision]
        self._not_mine = [*others(map(ModelSlice.elements, pieces), memory.size)]
        self._buffers = [(self.holder(e.name), e, lo, hi) for e, lo, hi in layout.slices(AVERAGED)]

    def holder(self, name: str) -> int:
        """The rank whose copy of the buffer of that name counts."""
        return 0

    def begin(self) -> None:
        """Take the values from the replica's memory, and drop the gradients."""
        self.free()
        with torch.no_grad():
            for each in self.pieces:
                if each.parameter is None:
                    continue
                each.parameter.grad = None
                if each.value is not each.master:
                    each.value.copy_(each.master)
                if each.local is not each.value:
                    each.local.copy_(each.value)

    def free(self) -> None:
        """Unmap the elements that only other ranks compute with."""
        for number in range(PARAMETERS, FREE):
            self.memory.free(number, self._not_mine)

    def run(
        self, batches: Sequence[Weighted], step: int, epoch: int
    ) -> list[tuple[float, Measured]]:
        """Accumulate the gradients of these batches in autograd, as `scaled`. Returns the losses
        that count, each with its fraction of the samples. Raises TaskError.
        """
        self.modes.train()
        found = []
        for batch, part in batches:
            loss = self.loss(batch, step, epoch)
            with calling("the backward pass of task.loss", self.task.at("loss")):
                scaled(loss, part).backward()  # type: ignore[no-untyped-call]
                found.append((part, in_numbers(self.task, loss)))
        return [(part, measured) for part, measured in found if part and self.tells]

    def loss(self, batch: Any, step: int, epoch: int) -> Any:
        with calling("moving the batch to the device", self.task.at("dataset")):
            batch = to_device(batch, self.device)
        is_on = self._precision is not None
        try:
            with torch.autocast(self.device.type, self._precision, enabled=is_on):
                return self.task.loss(self.model, batch, step, epoch)
        except TaskError as error:
            if "DTensor" in error.message:
                error.hint = error.hint or (
                    "the loss uses a slice directly: call the model as a whole, model(...), or cut "
                    "it in the task, by parallelize(model, mesh)"
                )
            raise

    def gradients(self) -> list[Tensor | None]:
        """float32, of each piece; None: there is none, or another rank reports it."""
        return [self._gradient(each) if each.is_owned else None for each in self.pieces]

    def _gradient(self, piece: ModelSlice) -> Tensor | None:
        assert piece.parameter is not None
        gradient, piece.parameter.grad = piece.parameter.grad, None
        if isinstance(gradient, DTensor):
            assert isinstance(piece.parameter, DTensor)
            gradient = gradient.redistribute(placements=piece.parameter.placements).to_local()
        if gradient is None:
            return None
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        return dense.to(torch.float32)

    def gather(self, gradients: Sequence[Tensor | None], number: int) -> None:
        """Copy the gradients into a zeroed vector of the replica's memory."""
        vector = self.memory.vector(number)
        for each, gradient in zip(self.pieces, gradients, strict=True):
            if gradient is not None:
                each.of(vector).copy_(gradient)

    # ---------------------------------------------------------------- buffers

    def averaged(self) -> Array:
        """float64[n], as `Replica.averaged`; all ranks load these values. Every rank has to call
        this.
        """
        values = np.zeros(self.layout.size(AVERAGED), np.float64)
        if not values.size:
            return values
        for holder, entry, lo, hi in self._buffers:
            if holder == self.rank:
                buffer = find(self.model, entry.name).detach()
                values[lo:hi] = buffer.reshape(-1).to("cpu", torch.float64).numpy()
        dist.all_reduce(torch.from_numpy(values))
        self.load_averaged(values)
        return values

    def load_averaged(self, values: Array) -> None:
        for _, entry, lo, hi in self._buffers:
            source = torch.tensor(values[lo:hi], device="cpu").view(entry.shape)
            for name in (entry.name, *entry.aliases):
                tensor = find(self.model, name)
                rounded = source if tensor.is_floating_point() else source.round()
                tensor.detach().copy_(rounded)


def scaled(loss: LossResult, part: float) -> Tensor:
    """A batch's part of the step's loss. Weights of the task's loss are those of several ranks:
    only `PartStepper.step` divides by their sum.
    """
    return loss.value * (part if loss.weight is None or not part else loss.weight)


class PartStepper:
    """One step of a rank: see `Stepper`, which does this for a replica of one process."""

    def __init__(
        self, part: RankPart, job: JobFile, groups: Sequence[ParameterGroup | None]
    ) -> None:
        """Build the rank's part of the optimiser. Raises DlctlError, TaskError."""
        self.part = part
        is_clipped_here = job.gradient.clip == "replica"
        self.clip_norm = job.gradient.clip_norm if is_clipped_here else 0.0
        names = [entry.name for entry, _, _ in part.layout.slices(TRAINED)]
        self.inner = inner_optimizer.make(
            job.inner, [each.value for each in part.pieces], groups, names
        )
        self.steps = 0
        self._is_placed = False
        """The optimiser's state is in the replica's memory."""

    def step(
        self,
        batches: Sequence[Weighted],
        *,
        own_lr: float | None,
        gather: int | None,
        norm_max: float = sys.float_info.max,
        epoch: int = 0,
        pull: tuple[float, int] | None = None,
        fresh: bool = False,
        seed: int | None = None,
    ) -> tuple[Stepped, list[tuple[float, Measured]]]:
        """As `Stepper.step`; also returns what this rank has measured. gather: number of the vector
        that receives the gradient. pull: strength, and number of the vector to pull toward. seed:
        for torch's generator, the same in all ranks.
        """
        if seed is not None:
            torch.manual_seed(seed)
        self.part.begin()
        measured = self.part.run(batches, self.steps, epoch)
        gradients = self.part.gradients()
        loss, norm = self._of_all(measured, gradients)
        clipped = min(norm, self.clip_norm) if self.clip_norm and math.isfinite(norm) else norm
        if not (math.isfinite(loss) and clipped <= norm_max):
            return Stepped(loss, None, norm, is_usable=False), measured
        self.steps += 1
        if self.clip_norm and norm > self.clip_norm * (1 - CLOSE):
            kept = [gradient for gradient in gradients if gradient is not None]
            torch._foreach_mul_(kept, min(1.0, self.clip_norm / (norm + 1e-6)))
        if gather is not None:
            self.part.gather(gradients, gather)
        if own_lr is not None:
            self._step_itself(gradients, own_lr, pull, fresh)
        return Stepped(loss, None, norm, is_usable=True), measured

    def _of_all(
        self, measured: Sequence[tuple[float, Measured]], gradients: Sequence[Tensor | None]
    ) -> tuple[float, float]:
        """The loss and the norm over all ranks; with weights of the task's loss it makes means of
        the sums of gradients. This is a barrier: the values in the replica's memory may change only
        after it.
        """
        loss = sum(weight_of(part, each) * each.loss for part, each in measured)
        weight = sum(each.weight or 0.0 for _, each in measured)
        is_weighed = any(each.weight is not None for _, each in measured)
        sums = torch.tensor(
            [loss, norm_of(gradients) ** 2, weight, is_weighed], dtype=torch.float64
        )
        dist.all_reduce(sums)
        loss, squares, weight, is_weighed = sums.tolist()
        norm = math.sqrt(squares)
        if not is_weighed:
            return loss, norm
        for gradient in gradients:
            if gradient is not None and weight:
                gradient.div_(weight)
        return (loss / weight, norm / weight) if weight else (math.nan, math.nan)

    def _step_itself(
        self,
        gradients: list[Tensor | None],
        lr: float,
        pull: tuple[float, int] | None,
        fresh: bool,
    ) -> None:
        assert self.inner is not None
        if fresh:
            self.inner.forget()
            self._is_placed = False
        if pull is not None:
            strength, number = pull
            toward = self.part.memory.vector(number)
            for each, gradient in zip(self.part.pieces, gradients, strict=True):
                if gradient is not None:
                    aim = each.of(toward).to(each.value.device)
                    gradient.add_(each.value - aim, alpha=strength)
        if self.part.device.type != "cpu":
            self.inner.step(gradients, lr)
            for each in self.part.pieces:
                if each.is_owned:
                    each.master.copy_(each.value)
            return
        for some in [gradients] if self._is_placed else _a_few_each(gradients):
            self.inner.step(some, lr)
            self.inner.place(self._in_memory)
        self._is_placed = True

    # ---------------------------------------------------------------- what is saved

    def _in_memory(self, index: int, keys: Sequence[str], key: str, value: Tensor) -> Tensor:
        """Keep an optimiser's state tensors in the replica's memory: saving it copies nothing
        then.
        """
        each, at = self.part.pieces[index], STATES + keys.index(key)
        if value.shape != each.value.shape or value.dtype is not torch.float32 or at >= FREE:
            return value
        place = each.of(self.part.memory.vector(at))
        if value.data_ptr() != place.data_ptr():
            place.copy_(value)
        return place

    def state(self) -> Kept:
        """The optimiser's state; tensors of its pieces' shapes are in the replica's memory."""
        if self.inner is None:
            return {}
        pieces, keys = self.part.pieces, self.inner.keys()
        found: dict[str, Array | int] = {}
        for name, array in self.inner.state().items():
            index, key = self.inner.of_name(name)
            at = STATES + keys.index(key) if key in keys else 0
            is_whole = index < 0 or array.shape != tuple(pieces[index].value.shape)
            if is_whole or array.dtype != np.float32 or not STATES <= at < FREE:
                found[name] = array
                continue
            place = pieces[index].of(self.part.memory.vector(at))
            if array.size and array.ctypes.data != place.data_ptr():
                place.copy_(torch.from_numpy(array))
            found[name] = at
        return found

    def restore(self, kept: Kept) -> None:
        """Load the `state` of all ranks. Raises DlctlError if it is of another optimiser."""
        if self.inner is None:
            return
        mine: dict[str, Array] = {}
        for name, value in kept.items():
            index, _ = self.inner.of_name(name)
            if index >= 0 and not self.part.pieces[index].is_owned:
                continue
            if isinstance(value, int):
                value = self.part.pieces[index].of(self.part.memory.vector(value)).numpy()
            mine[name] = value
        self.inner.restore(mine)
        if self.part.device.type == "cpu":
            self.inner.place(self._in_memory)
            self._is_placed = True


def _a_few_each(gradients: Sequence[Tensor | None]) -> Iterator[list[Tensor | None]]:
    """The gradients in groups, the others None. In its first step an optimiser creates its state,
    which is then moved: this way only part of it exists twice at a time.
    """
    some: list[Tensor | None] = [None] * len(gradients)
    held = 0
    for index, gradient in enumerate(gradients):
        some[index] = gradient
        held += 0 if gradient is None else gradient.nbytes
        if held > FEW_BYTES or index == len(gradients) - 1:
            yield some
            some, held = [None] * len(gradients), 0
