"""The user's model, and its trained parameters as one vector in host memory.

The tensors remain the user's: the objects, their strides, dtypes and devices, what is tied and what
is compiled. Values are copied out of them and back at the boundaries of a round, never shared, so
that whatever the user's script does with its model works as without a run.

A parameter of a narrower dtype than float32 is rounded when values are written to it. The vector
keeps their digits, and `gather` adds what the parameter has moved since: else a method would take
the rounding for a part of its steps.

Errors have no `where`: the caller knows the line of the user's call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from daemons.worker.other_tensors import OtherTensors, buffers_kept
from daemons.worker.replica import put_together, shaped_views
from daemons.worker.task.model_changes import tensors_of
from daemons.worker.task.model_tensors import describe, find, kind, layout_of
from daemons.worker.task.user_task import dtype_name
from dlctl.errors import DlctlError
from dlctl.model.flat import CONSTANT, TRAINED, Layout
from dlctl.model.vector import euclidean_norm
from dlctl.wire.messages import Array

COMPILED = "_orig_mod"
"""The only submodule of what torch.compile returns: the user's own module."""
CUT_BY = {
    "FullyShardedDataParallel": "FSDP",
    "DeepSpeedEngine": "DeepSpeed",
}
"""Class of a wrapper that leaves this process with a part of each parameter, and its usual name."""
NARROW = (torch.bfloat16, torch.float16)
_WHOLE = "attach a model that is whole in this process; DistributedDataParallel is"


class ModelVector:
    """layout: of the model, with the names that it has without wrappers.
    parameters: the trained ones, in the order of the vector.
    """

    def __init__(self, model: nn.Module) -> None:
        """Raises DlctlError for a model that cannot be trained in a run."""
        self._model = unwrapped(model)
        for module in self._model.modules():
            if cut_by := CUT_BY.get(type(module).__name__):
                raise DlctlError(f"the model is wrapped in {cut_by}", hint=_WHOLE)
        self._known = _named(self._model)
        for name, tensor in self._known.items():
            _check(name, tensor)
        self.layout = _without_wrappers(layout_of(self._model))
        self.parameters: list[nn.Parameter] = []
        self._names: dict[int, str] = {}
        for entry in self.layout.entries:
            tensor = find(self._model, entry.name)
            self._names[id(tensor)] = entry.name
            if entry.kind == TRAINED:
                assert isinstance(tensor, nn.Parameter)
                self.parameters.append(tensor)
        self._others = OtherTensors(self._model, self.layout)

    @cached_property
    def vector(self) -> Array:
        """float32[d], the trained parameters: those of the model when this is first used, when it
        has arrived on its device.
        """
        vector = self.room()
        _read(self.views(vector), self.parameters)
        return vector

    @cached_property
    def _views(self) -> list[Tensor]:
        return self.views(self.vector)

    def name_of(self, parameter: Tensor) -> str | None:
        """None: it is no parameter of the model."""
        return self._names.get(id(parameter))

    def room(self) -> Array:
        """float32[d] of any content, page-locked if the model is on a GPU: copies are faster."""
        is_locked = any(parameter.device.type == "cuda" for parameter in self.parameters)
        # Dtypes and devices are explicit: the user may have changed the defaults.
        room = torch.empty(
            self.layout.size(), dtype=torch.float32, device="cpu", pin_memory=is_locked
        )
        return room.numpy()

    def views(self, vector: Array) -> list[Tensor]:
        """Views of float32[d], one for each of `parameters`, in its shape."""
        # For a tensor, numpy's memory has to be writable.
        whole = vector if vector.flags.writeable else vector.copy()
        return shaped_views(torch.from_numpy(whole), self.layout)

    # ------------------------------------------------------------ values and gradients

    @torch.no_grad()
    def gather(self) -> None:
        """Model -> vector, which has the values of the last `scatter`."""
        pairs = [*zip(self._views, self.parameters, strict=True)]
        exact = [(view, each) for view, each in pairs if each.dtype not in NARROW]
        _read([view for view, _ in exact], [each for _, each in exact])
        for view, parameter in pairs:
            if parameter.dtype in NARROW:
                moved = parameter.detach().to("cpu").float()
                view += moved.sub_(view.to(parameter.dtype))

    def scatter(self) -> None:
        """Vector -> model."""
        _write(self.parameters, self._views)

    def has_gradient(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)

    def gather_gradient(self, out: Array) -> float:
        """Copy the gradients to float32[d], with zeros where there is none, and return their norm.
        If that is not finite, some gradient is not, or their squares overflow.
        """
        _read(self.views(out), [parameter.grad for parameter in self.parameters])
        return euclidean_norm(out)

    # ------------------------------------------------------------ what is not in the vector

    def averaged(self) -> Array:
        """All persistent buffers, float64[n]; integers are exact."""
        return self._others.averaged()

    def load_averaged(self, values: Array) -> None:
        """Load values of `averaged()`; integer buffers are rounded."""
        self._others.load_averaged(values)

    def frozen(self) -> list[Tensor]:
        """The frozen parameters, in the order of `dlctl.model.frozen.entries`."""
        return self._others.frozen()

    def load_frozen(self, values: Mapping[int, Tensor]) -> None:
        """Replace some of `frozen()`, by position."""
        self._others.load_frozen(values)

    # ------------------------------------------------------------ other values for a while

    @contextmanager
    def holding(self, values: Array, averaged: Array) -> Iterator[None]:
        """Within this the model has these values, float32[d], and float64[n] as `averaged()`. At
        the end its own are back to the bit, with all buffers. The vector is not touched.
        """
        with self.values_kept(), buffers_kept(self._model):
            _write(self.parameters, self.views(values))
            self.load_averaged(averaged)
            yield

    @contextmanager
    def values_kept(self) -> Iterator[None]:
        """Put the values of the trained parameters back at the end, to the bit."""
        # In host memory: there may be no room for them on a GPU.
        kept = [parameter.detach().to("cpu", copy=True) for parameter in self.parameters]
        try:
            yield
        finally:
            _write(self.parameters, kept)

    # ------------------------------------------------------------ what must not change

    def check(self) -> None:
        """Raises DlctlError if tensors of the model were added, removed, replaced, reshaped or
        converted to another dtype, or frozen ones are trained. A move to another device is fine.
        Walks over all modules: some microseconds for each tensor.
        """
        now = _named(self._model)
        for name, tensor in now.items():
            was = self._known.get(name)
            what = f'{describe(tensor)} "{name}"'
            if was is None:
                raise _changed(f"{what} was added to the model", "add it before dlctl.attach")
            # A forward pass may replace buffers.
            if was is not tensor and (kind(was), kind(tensor)) != ("averaged", "averaged"):
                raise _changed(
                    f"{what} was replaced by another tensor",
                    'change its values in place: "copy_", or load_state_dict without assign=True',
                )
            _check(name, tensor)
        for name in sorted(self._known.keys() - now.keys()):
            what = f'{describe(self._known[name])} "{name}"'
            raise _changed(f"{what} was removed from the model", "remove it before dlctl.attach")
        for entry in self.layout.entries:
            tensor = now[entry.name]
            shape, dtype = tuple(tensor.shape), dtype_name(tensor)
            if (shape, dtype) != (entry.shape, entry.dtype):
                raise _changed(
                    f'{describe(tensor)} "{entry.name}" was {entry.dtype}{list(entry.shape)} and '
                    f"is {dtype}{list(shape)}",
                    "convert the model before dlctl.attach",
                )
            if entry.kind == CONSTANT and tensor.requires_grad:
                raise _changed(
                    f'parameter "{entry.name}" was frozen, and is trained (requires_grad=True)',
                    "set requires_grad before dlctl.attach: what is frozen then is not exchanged",
                )


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module: without torch.compile, DistributedDataParallel and DataParallel."""
    while True:
        if COMPILED in model._modules:
            inner = model._modules[COMPILED]
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        else:
            return model
        assert isinstance(inner, nn.Module)
        model = inner


def _plain(name: str) -> str:
    """The name without the compiled modules in it."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {_plain(name): tensor for name, tensor in tensors_of(model).items()}


def _without_wrappers(layout: Layout) -> Layout:
    return Layout(
        tuple(
            replace(entry, name=_plain(entry.name), aliases=tuple(map(_plain, entry.aliases)))
            for entry in layout.entries
        )
    )


def _check(name: str, tensor: Tensor) -> None:
    """Raises DlctlError for a tensor without values of its own in this process."""
    what = f'{describe(tensor)} "{name}"'
    if is_lazy(tensor):
        raise DlctlError(
            f"{what} has no shape yet", hint="run one batch through the model before dlctl.attach"
        )
    if hasattr(tensor, "__tensor_flatten__"):
        cut_by = " (FSDP2, or tensor parallelism)" if type(tensor).__name__ == "DTensor" else ""
        raise DlctlError(
            f"{what} is a {type(tensor).__name__}{cut_by}, no plain tensor", hint=_WHOLE
        )
    if tensor.device.type == "meta":
        raise DlctlError(
            f'{what} is on the device "meta", and has no values',
            hint="load the weights before dlctl.attach",
        )


def _changed(message: str, hint: str) -> DlctlError:
    return DlctlError(f"{message} after dlctl.attach", hint=hint)


# ---------------------------------------------------------------- copies


def is_far(tensor: Tensor) -> bool:
    """Whether it is not in host memory."""
    return tensor.device.type != "cpu"


@torch.no_grad()
def _read(into: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> None:
    """Copy tensors of any dtype, stride and device to contiguous float32 ones in host memory; zeros
    for missing ones.
    """
    near: list[tuple[Tensor, Tensor | None]] = []
    far: list[tuple[Tensor, Tensor]] = []
    for slot, tensor in zip(into, tensors, strict=True):
        if tensor is not None and is_far(tensor):
            far.append((slot, tensor))
        else:
            near.append((slot, tensor))
    put_together([slot for slot, _ in near], [tensor for _, tensor in near])
    for slot, tensor in far:
        dense = tensor.to_dense() if tensor.is_sparse else tensor
        # Converted there, one by one: the copy itself is then a transfer, and nothing waits for it.
        slot.copy_(dense.detach().float().contiguous(), non_blocking=True)
    _finish([tensor for _, tensor in far])


@torch.no_grad()
def _write(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values in host memory to tensors of any dtype, stride and device."""
    near: list[tuple[Tensor, Tensor]] = []
    far: list[tuple[Tensor, Tensor]] = []
    for tensor, value in zip(tensors, values, strict=True):
        (far if is_far(tensor) else near).append((tensor, value))
    if near:
        torch._foreach_copy_([tensor for tensor, _ in near], [value for _, value in near])
    for tensor, value in far:
        tensor.copy_(value.to(tensor.device, non_blocking=True))
    _finish([tensor for tensor, _ in far])


def _finish(tensors: Sequence[Tensor]) -> None:
    """Wait for the copies: the memory in the host may be read and written then."""
    for device in {tensor.device for tensor in tensors}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
