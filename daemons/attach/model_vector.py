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

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from daemons.attach.tensor_copies import Copies, OwnCopies, write
from daemons.worker.other_tensors import OtherTensors, buffers_kept
from daemons.worker.replica import shaped_views
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

    def __init__(self, model: nn.Module, copies: Copies | None = None) -> None:
        """copies: None if this process is the replica. Raises DlctlError for a model that cannot be
        trained in a run.
        """
        self._model = unwrapped(model)
        self.copies: Copies = OwnCopies() if copies is None else copies
        self._may_be_cut = copies is not None
        for module in self._model.modules():
            if cut_by := CUT_BY.get(type(module).__name__):
                raise DlctlError(f"the model is wrapped in {cut_by}", hint=_WHOLE)
        self._known = _named(self._model)
        for name, tensor in self._known.items():
            _check(name, tensor, may_be_cut=self._may_be_cut)
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
        has arrived on its device. Zeros in a later rank.
        """
        vector = self.room()
        self._settle()
        self.copies.read(self.views(vector), self.parameters)
        return vector

    @cached_property
    def _views(self) -> list[Tensor]:
        return self.views(self.vector)

    def name_of(self, parameter: Tensor) -> str | None:
        """None: it is no parameter of the model."""
        return self._names.get(id(parameter))

    def room(self) -> Array:
        """float32[d] of any content, page-locked if the model is on a GPU: copies are faster."""
        if not self.copies.leads:
            return np.broadcast_to(np.float32(0), (self.layout.size(),))  # It takes no memory.
        is_locked = any(parameter.device.type == "cuda" for parameter in self.parameters)
        # Dtypes and devices are explicit: the user may have changed the defaults.
        room = torch.empty(
            self.layout.size(), dtype=torch.float32, device="cpu", pin_memory=is_locked
        )
        return room.numpy()

    def views(self, vector: Array) -> list[Tensor]:
        """Views of float32[d], one for each of `parameters`, in its shape."""
        if not self.copies.leads:
            return [torch.zeros((), device="cpu").expand(each.shape) for each in self.parameters]
        # For a tensor, numpy's memory has to be writable.
        whole = vector if vector.flags.writeable else vector.copy()
        return shaped_views(torch.from_numpy(whole), self.layout)

    # ------------------------------------------------------------ values and gradients

    @torch.no_grad()
    def gather(self) -> None:
        """Model -> vector, which has the values of the last `scatter`."""
        self._settle()
        pairs = [*zip(self._views, self.parameters, strict=True)]
        exact = [(view, each) for view, each in pairs if each.dtype not in NARROW]
        self.copies.read([view for view, _ in exact], [each for _, each in exact])
        for view, parameter in pairs:
            if parameter.dtype in NARROW:
                whole = self.copies.whole(parameter.detach())
                if whole is not None:
                    moved = whole.to("cpu").float()
                    view += moved.sub_(view.to(parameter.dtype))

    def scatter(self) -> None:
        """Vector -> model."""
        self._settle()
        self.copies.write(self.parameters, self._views)

    def take(self, values: Array) -> None:
        """Put float32[d] into the vector."""
        if self.copies.leads:
            self.vector[:] = values

    def placed(self, values: Array) -> list[Tensor]:
        """float32[d] as tensors of their own, each on the device of its parameter, and cut as it
        is.
        """
        if not self._may_be_cut:
            pairs = zip(self.views(values), self.parameters, strict=True)
            return [view.to(each.device) for view, each in pairs]
        rooms = [torch.empty_like(each, dtype=torch.float32) for each in self.parameters]
        self.copies.write(rooms, self.views(values))
        return rooms

    def _settle(self) -> None:
        """Let FSDP2 drop the whole parameters that it has put together for a forward pass."""
        for module in self._model.modules() if self._may_be_cut else ():
            if (reshard := getattr(module, "reshard", None)) is not None:
                reshard()

    def has_gradient(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)

    def gather_gradient(self, out: Array) -> float:
        """Copy the gradients to float32[d], with zeros where there is none, and return their norm.
        If that is not finite, some gradient is not, or their squares overflow.
        """
        self.copies.read(self.views(out), [parameter.grad for parameter in self.parameters])
        return euclidean_norm(out) if self.copies.leads else 0.0

    # ------------------------------------------------------------ what is not in the vector

    def averaged(self) -> Array:
        """All persistent buffers, float64[n]; integers are exact."""
        return self._others.averaged()

    def load_averaged(self, values: Array) -> None:
        """Load values of `averaged()`; integer buffers are rounded."""
        self._others.load_averaged(values)

    def frozen(self) -> list[Tensor]:
        """The frozen parameters, in the order of `dlctl.model.frozen.entries`; empty in a later
        rank.
        """
        whole = (self.copies.whole(tensor) for tensor in self._others.frozen())
        return [torch.empty(0, device="cpu") if each is None else each for each in whole]

    def load_frozen(self, values: Mapping[int, Tensor]) -> None:
        """Replace some of `frozen()`, by position."""
        mine = self._others.frozen()
        cut = {
            n: self.copies.part(value.view(mine[n].shape), mine[n]) for n, value in values.items()
        }
        self._others.load_frozen(cut)

    def whole_state(self) -> dict[str, Any]:
        """The state_dict; only rank 0 has all of its values."""
        self._settle()
        state = self._model.state_dict()
        return {
            name: self.copies.whole(value) if isinstance(value, Tensor) else value
            for name, value in state.items()
        }

    # ------------------------------------------------------------ other values for a while

    @contextmanager
    def holding(self, values: Array, averaged: Array) -> Iterator[None]:
        """Within this the model has these values, float32[d], and float64[n] as `averaged()`. At
        the end its own are back to the bit, with all buffers. The vector is not touched.
        """
        with self.values_kept(), buffers_kept(self._model):
            self.copies.write(self.parameters, self.views(values))
            self.load_averaged(averaged)
            yield

    @contextmanager
    def values_kept(self) -> Iterator[None]:
        """Put the values of the trained parameters back at the end, to the bit."""
        self._settle()
        mine = [self.copies.local(parameter.detach()) for parameter in self.parameters]
        # In host memory: there may be no room for them on a GPU.
        kept = [tensor.to("cpu", copy=True) for tensor in mine]
        try:
            yield
        finally:
            self._settle()
            write(mine, kept)

    # ------------------------------------------------------------ what must not change

    def check(self) -> None:
        """Raises DlctlError if tensors of the model were added, removed, replaced, reshaped or
        converted to another dtype, or frozen ones are trained. A move to another device is fine.
        Walks over all modules: some microseconds for each tensor.
        """
        self._settle()
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
            _check(name, tensor, may_be_cut=self._may_be_cut)
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


def _check(name: str, tensor: Tensor, *, may_be_cut: bool) -> None:
    """Raises DlctlError for a tensor without values of its own in this process."""
    what = f'{describe(tensor)} "{name}"'
    if is_lazy(tensor):
        raise DlctlError(
            f"{what} has no shape yet", hint="run one batch through the model before dlctl.attach"
        )
    is_cut = type(tensor).__name__ == "DTensor"
    if hasattr(tensor, "__tensor_flatten__") and not (is_cut and may_be_cut):
        by = " (FSDP2, or tensor parallelism)" if is_cut else ""
        hint = "give dlctl.attach the group: attach(model, optimizer, group=True)"
        raise DlctlError(
            f"{what} is a {type(tensor).__name__}{by}, no plain tensor",
            hint=hint if is_cut else _WHOLE,
        )
    if tensor.device.type == "meta":
        raise DlctlError(
            f'{what} is on the device "meta", and has no values',
            hint="load the weights before dlctl.attach",
        )


def _changed(message: str, hint: str) -> DlctlError:
    return DlctlError(f"{message} after dlctl.attach", hint=hint)
