"""One model replica: the user's model as a flat float32 vector, and gradients of the same kind.

On the CPU the vector is a numpy array that *is* the model: its float32 parameters are views of that
memory, so a local step or a fetched value needs no copy. On a GPU it is a torch tensor there.
Parameters of another dtype (bfloat16, float16, float64) have float32 masters in the vector and are
cast from them before each forward pass.

Autograd keeps its own gradient tensors, which are copied to the flat vector once: for 5 thousand to
25 million parameters this was measured to be faster than accumulating into views of the vector.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from daemons.worker.early_sum import BeginSum, GradientParts
from daemons.worker.other_tensors import OtherTensors, buffers_kept
from daemons.worker.row_tables import RowSteps, entries_of
from daemons.worker.task.model_changes import ModelChanges
from daemons.worker.task.model_tensors import find, layout_of
from daemons.worker.task.module_modes import Modes
from daemons.worker.task.user_task import LossResult, Task, TaskError, calling, number_of
from dlctl.errors import DlctlError
from dlctl.model.flat import TRAINED, Layout
from dlctl.model.vector import Vector
from dlctl.wire.messages import Array

PIECE = 1 << 20
"""Elements that are checked at a time: there may be no memory for a mask of a whole parameter."""
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Measured(NamedTuple):
    """The results of one batch."""

    loss: float
    """The loss of the batch, which may be NaN or infinite."""
    metrics: dict[str, float]
    """The finite ones of the metrics that the task's loss returns."""
    weight: float | None = None
    """The weight of the batch among those of its step, if the task's loss returns one."""


class TorchReplica:
    """The model of one worker.

    layout: what lies where. parameters: float32[d], the trained part, numpy on the CPU and a torch
    tensor on a GPU; writing to it is writing to the model.

    The initial values depend on `seed` alone, so that all workers build the same model. Raises
    TaskError for what is wrong with the task, DlctlError if there is no such device.
    """

    def __init__(
        self,
        task: Task,
        *,
        device: str,
        seed: int,
        precision: str = "fp32",
        compiled: bool = False,
        prepare: Callable[[nn.Module], None] | None = None,
    ) -> None:
        """precision: of the forward pass, by autocast. compiled: by torch.compile.
        prepare: changes the new model before it is laid out.
        """
        self.task = task
        self.seed = seed
        self.lacks_weights = False
        """The job's initial values are not on this host."""
        self.device = choose_device(device)
        seed_all(seed)
        model = task.model()
        if prepare is not None:
            prepare(model)
        tables = entries_of(task)
        try:
            self.layout = layout_of(model, tables)
        except TaskError as error:
            error.where = error.where or task.place("model")
            raise
        self.rows = RowSteps(task, self.layout, self.device) if tables else None
        with calling(f"moving the model to {self.device}", task.at("model")):
            self.model = model.to(self.device)
        self.modes = Modes(task, self.model)
        self._vector, has_values = self._room()
        self._bound = self._bind(has_values)
        self._changes = ModelChanges(task, self.model)
        self._others = OtherTensors(self.model, self.layout, lambda: task.place("loss"))
        self.values = [view for _, view in self._bound]
        """float32, the trained parameters one by one: views of the vector."""
        self.parameters: Vector = _own(self._vector)
        self._autocast = AUTOCAST[precision]
        self._compiled: Any = torch.compile(self.model) if compiled else None
        self._parts: GradientParts | None = None
        """The parts of the gradient, if they are summed while they are computed; else None."""
        self._weights: Tensor | None = None
        """The sum of the weights of the step's batches so far, if the task's loss returns any."""
        self.on_reweighed: Callable[[Tensor], None] = lambda factor: None
        """Called with the factor by which the gradient of the step's batches so far changes."""

    def share(self, vector: Tensor) -> None:
        """Move the model to this host memory, float32[d], and take the values that are there. Other
        processes may write to them at any time.
        """
        self._place(vector)
        self._vector, self.parameters = vector, _own(vector)
        self._changes.others_step()

    def _place(self, vector: Tensor) -> None:
        """Make the model's values views of this memory; the tensor objects remain the same."""
        for (parameter, value), view in zip(
            self._bound, shaped_views(vector, self.layout), strict=True
        ):
            value.data = view
            if parameter.dtype is torch.float32:
                parameter.data = view
        self._cast()

    @cached_property
    def _gradient(self) -> Tensor:
        """Allocated when a flat gradient is first needed."""
        return torch.zeros_like(self._vector)

    @cached_property
    def _slots(self) -> list[Tensor]:
        return shaped_views(self._gradient, self.layout)

    def _room(self) -> tuple[Tensor, bool]:
        """The vector for the parameters, and whether it receives their values.

        Dtypes and devices are explicit here and below: the task may have changed the defaults.
        """
        return torch.empty(self.layout.size(), dtype=torch.float32, device=self.device), True

    def _bind(self, has_values: bool) -> list[tuple[nn.Parameter, Tensor]]:
        """Move the parameters into the vector; float32 ones become views of it."""
        bound, views = [], shaped_views(self._vector, self.layout)
        for (entry, _, _), view in zip(self.layout.slices(TRAINED), views, strict=True):
            parameter = find(self.model, entry.name)
            assert isinstance(parameter, nn.Parameter)
            if has_values:
                view.copy_(parameter.detach())
            if parameter.dtype is torch.float32:
                parameter.data = view
            # A view would keep this vector in memory after a move to another one.
            bound.append((parameter, view.data))
        return bound

    def reseed(self, slot: int, term: int, rank: int = 0) -> None:
        """Seed all generators (dropout, augmentation) for this term of this slot.

        The loader processes have their own seed: `PortionLoader.reseed`.
        """
        seed_all(seed_of(self.seed, slot, term, *[rank][: rank > 0]))

    def check_finite(self) -> None:
        """Raises TaskError naming a parameter with a value that is NaN or infinite in float32."""
        for entry, lo, hi in self.layout.slices(TRAINED):
            pieces = torch.split(self._vector[lo:hi], PIECE)
            wrong = hi - lo - sum(int(torch.isfinite(piece).sum()) for piece in pieces)
            if wrong:
                raise TaskError(
                    f'parameter "{entry.name}" of the new model has {wrong} of {hi - lo} values '
                    "that are NaN or infinite",
                    where=self.task.place("model"),
                    hint="initialise it in model(): torch.empty returns uninitialised memory",
                )

    # ---------------------------------------------------------------- gradients

    def try_batch(self, batch: Any) -> None:
        """Compute the gradient of one batch to measure its memory, and discard it. Raises
        TaskError."""
        with self._placed(self._vector.clone()):
            self.forget_gradients()
            self.backward(batch, is_trial=True)
            self.gradients()

    def forget_gradients(self) -> None:
        """Drop the gradients at the start of a step."""
        self._weights = None
        self._changes.begin()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Free the gradients and their memory."""
        for parameter, _ in self._bound:
            parameter.grad = None

    def train_through(self, module: nn.Module) -> None:
        """From now on the task's loss gets this wrapper of the model, such as torch's DDP."""
        self._compiled = module

    def backward(
        self,
        batch: Any,
        weight: float = 1.0,
        *,
        scale: float = 1.0,
        step: int = 0,
        epoch: int = 0,
        rows: dict[str, Tensor] | None = None,
        is_trial: bool = False,
    ) -> Measured:
        """Accumulate weight times the gradient of one batch in autograd. If the task's loss returns
        weights, they replace this one: the gradient is the mean over the step's batches so far.
        scale: of the loss. step, epoch, rows: for a loss that takes them. is_trial: do not compile
        the model for it. Raises TaskError.
        """
        with calling("moving the batch to the device", self.task.at("dataset")):
            batch = to_device(batch, self.device)
        self.modes.train()
        self._cast()
        # Not by truth value: a compiled module has a `len()` that fails for most models.
        model = self.model if self._compiled is None or is_trial else self._compiled
        is_on = self._autocast is not None  # A disabled autocast costs a small model a tenth.
        with torch.autocast(self.device.type, self._autocast) if is_on else nullcontext():
            loss = self.task.loss(model, batch, step, epoch, rows)
        with calling("the backward pass of task.loss", self.task.at("loss")):
            factor = (weight if loss.weight is None else self._share_of(loss)) * scale
            is_one = isinstance(factor, float) and factor == 1.0
            value = loss.value if is_one else loss.value * factor
            value.backward()  # type: ignore[no-untyped-call]
            return in_numbers(self.task, loss)  # A GPU reports its errors only now.

    @torch.no_grad()
    def _share_of(self, loss: LossResult) -> Tensor:
        """The batch's share of the weights so far. Scales the gradient of the earlier batches to
        theirs. Nothing waits for the device.
        """
        weight, device = loss.weight, loss.value.device
        if isinstance(weight, Tensor) and weight.device == device:
            weight = weight.to(torch.float64).reshape(())
        else:  # A copy to the device would wait for it.
            weight = torch.full((), number_of(weight), dtype=torch.float64, device=device)
        if self._weights is None:
            self._weights = torch.zeros_like(weight)
        total = self._weights + weight
        least = torch.finfo(torch.float64).tiny  # Empty batches only: the sum is 0.
        before, self._weights = self._weights / total.clamp(min=least), total
        for parameter, _ in self._bound:
            if parameter.grad is not None:
                parameter.grad.mul_(before)
        self.on_reweighed(before)
        return (weight / total.clamp(min=least)).float()

    def gradients(self) -> list[Tensor | None]:
        """Take the gradients from autograd: float32, one for each of `values`."""
        self._changes.end()
        found = []
        for parameter, view in self._bound:
            gradient, parameter.grad = parameter.grad, None
            if parameter.dtype is torch.float32 and parameter.data_ptr() != view.data_ptr():
                # The user's code has moved the parameter to other memory (`flatten_parameters`).
                view.copy_(parameter.detach())
                parameter.data = view
            found.append(gradient if gradient is None else gradient.float())
        return found

    def gathered(self, gradients: Sequence[Tensor | None]) -> Vector:
        """The flat gradient, float32[d], with zeros for missing ones."""
        put_together(self._slots, gradients)
        return _own(self._gradient)

    def sum_early(self, begin: BeginSum, weight: float) -> bool:
        """Sum the gradient during the next backward pass, the last one of the step; False: there is
        no group.
        """
        early = begin(len(self._vector), weight)
        if early is None:
            return False
        if self._parts is None:
            bounds = [(lo, hi) for _, lo, hi in self.layout.slices(TRAINED)]
            self._parts = GradientParts([p for p, _ in self._bound], bounds, self._gather_kept)
        self._parts.watch(early)
        return True

    def gathered_early(self) -> Vector:
        """The gathered gradient, right after the pass of `sum_early`."""
        assert self._parts is not None
        return _own(self._parts.end())

    def _gather_kept(self, numbers: Sequence[int]) -> Tensor:
        """Copy the gradients of some parameters; autograd keeps them."""
        put_together([self._slots[n] for n in numbers], [self._bound[n][0].grad for n in numbers])
        return self._gradient

    def views_of(self, vector: Vector) -> list[Tensor]:
        """Views of float32[d] in the shapes of `values`."""
        whole = torch.from_numpy(vector) if isinstance(vector, np.ndarray) else vector
        return shaped_views(whole, self.layout)

    def _cast(self) -> None:
        """Update parameters that are no views from their float32 masters."""
        for parameter, view in self._bound:
            if parameter.dtype is not torch.float32:
                parameter.data.copy_(view)

    # ---------------------------------------------------------------- buffers and what is frozen

    def averaged(self) -> Array:
        """All persistent buffers, float64[n]; integers are exact."""
        return self._others.averaged()

    def frozen(self) -> list[Tensor]:
        """The frozen parameters, in the order of `dlctl.model.frozen.entries`."""
        return self._others.frozen()

    def load_averaged(self, values: Array) -> None:
        """Load values of `averaged()`; integer buffers are rounded."""
        self._others.load_averaged(values)

    def load_frozen(self, values: Mapping[int, Tensor]) -> None:
        """Replace some of `frozen()`, by position."""
        self._others.load_frozen(values)
        self._changes.record()

    # ---------------------------------------------------------------- evaluation

    def evaluate(self, parameters: Array, averaged: Array) -> dict[str, float]:
        """The task's metrics at these values, float32[d] and float64[n] as `averaged()`; {} if it
        has no `evaluate`. Raises TaskError.

        Training is not affected: values, modes and RNG states are restored.
        """
        if not self.task.has("evaluate"):
            return {}
        self._changes.check()
        with self._at(parameters, averaged):
            metrics = self.task.evaluate(self.model, self.rows.read if self.rows else None)
        self._changes.check()
        return metrics

    def finish(self, parameters: Array, averaged: Array, metrics: dict[str, float]) -> str:
        """What the task's `finish` returns at these values. Raises TaskError."""
        with self._at(parameters, averaged):
            return self.task.finish(self.model, metrics, self.rows.read if self.rows else None)

    @contextmanager
    def _at(self, parameters: Array, averaged: Array) -> Iterator[None]:
        """Within this, the model has these values and is in eval mode. On the CPU they are where
        `parameters` is: there may be no memory for another copy.
        """
        values = torch.from_numpy(parameters if parameters.flags.writeable else parameters.copy())
        with self._placed(values.to(self.device)), torch.no_grad():
            self.load_averaged(averaged)
            self.modes.evaluate()
            yield

    @contextmanager
    def _placed(self, vector: Tensor) -> Iterator[None]:
        """Within this, the model's values are in this vector. At the end its own are back, with the
        buffers, modes, `requires_grad` and RNG states.
        """
        modes = [(module, module.training) for module in self.model.modules()]
        trained = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        try:
            gpus = [self.device] if self.device.type == "cuda" else []
            with generators_kept(gpus), buffers_kept(self.model):
                self._place(vector)
                yield
        finally:
            self._place(self._vector)
            for module, mode in modes:
                module.training = mode
            for parameter, requires_grad in trained:
                parameter.requires_grad_(requires_grad)


def in_numbers(task: Task, loss: LossResult) -> Measured:
    """Convert a loss, its metrics and weight; those on the loss's device take a single transfer.
    Raises TaskError for a weight that is none.
    """
    extra = [*loss.metrics.values(), *([] if loss.weight is None else [loss.weight])]
    if not extra:
        return Measured(float(loss.value.detach()), {})
    is_beside = [isinstance(v, Tensor) and v.device == loss.value.device for v in extra]
    beside = [v for v, is_it in zip(extra, is_beside, strict=True) if is_it]
    together = [t.detach().reshape(()).to(torch.float64) for t in (loss.value, *beside)]
    value, *rest = torch.stack(together).tolist()
    moved = iter(rest)
    numbers = [
        next(moved) if is_it else number_of(v) for v, is_it in zip(extra, is_beside, strict=True)
    ]
    weight = None if loss.weight is None else numbers.pop()
    if weight is not None and not 0 <= weight < math.inf:
        raise TaskError(
            f"task.loss returned the weight {weight:g}: a weight is finite, and 0 or more",
            where=task.place("loss"),
            hint="for example the number of tokens that its mean is over",
        )
    metrics = zip(loss.metrics, numbers, strict=True)
    return Measured(value, {name: n for name, n in metrics if math.isfinite(n)}, weight)


# ---------------------------------------------------------------- devices and random numbers


def choose_device(name: str, index: int = 0) -> torch.device:
    """The device that "cpu", "auto", "cuda" or "cuda:1" means; `index` spreads workers over GPUs.

    Raises DlctlError if there is no such GPU.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    hint = 'set workers.device = "auto" to use a GPU only where there is one'
    if count == 0:
        why = "this torch is built without CUDA" if not torch.version.cuda else "torch finds no GPU"
        raise DlctlError(f'cannot compute on "{name}": {why}', hint=hint)
    device = torch.device(f"cuda:{index % count}" if name in ("auto", "cuda") else name)
    if device.type != "cuda" or (device.index or 0) >= count:
        raise DlctlError(f'cannot compute on "{name}": this machine has {count} GPUs', hint=hint)
    return device


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device: in lists, tuples and dicts, and objects with a
    `.to` method.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if type(batch) is list:
        return [to_device(item, device) for item in batch]
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, tuple):
        items = [to_device(item, device) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    return batch


def seed_all(seed: int) -> None:
    """Seed torch, numpy and random: the user's code may draw from any of them."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_of(*numbers: int) -> int:
    """A seed that depends on all of these."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def generators_kept(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Restore the states of all generators at the end: torch's on the CPU and on these GPUs,
    numpy's and Python's.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


# ---------------------------------------------------------------- vectors


def shaped_views(vector: Tensor, layout: Layout) -> list[Tensor]:
    """Views of float32[d], one for each trained tensor, in its shape."""
    return [vector[lo:hi].view(entry.shape) for entry, lo, hi in layout.slices(TRAINED)]


def put_together(into: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Copy the gradients to slots of their shapes; zeros for missing ones."""
    slots, dense = [], []
    for slot, gradient in zip(into, gradients, strict=True):
        if gradient is None:
            slot.zero_()
        elif gradient.is_sparse:
            slot.zero_().add_(gradient)  # This sums duplicate rows.
        else:
            slots.append(slot)
            dense.append(gradient)
    if slots:
        torch._foreach_copy_(slots, dense)


def _own(vector: Tensor) -> Vector:
    """The vector as callers get it: a numpy array on the CPU, a torch tensor on a GPU."""
    return vector.numpy() if vector.device.type == "cpu" else vector
