"""Cuts a model into slices for each rank: by FSDP2, by tensor parallelism, or by the task's own
code. A parameter that torch turns into a DTensor is cut; every rank has a copy of the others.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from daemons.worker.ranks.model_stages import units
from daemons.worker.task.model_tensors import find
from daemons.worker.task.user_task import Task, TaskError, calling
from dlctl.model.flat import TRAINED, Layout

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


class ModelSlice(NamedTuple):
    """A rank's piece of one trained parameter."""

    parameter: nn.Parameter | None
    """The model's parameter on this rank; None: the rank has no piece of it."""
    local: Tensor
    """The values that the rank computes with."""
    value: Tensor
    """float32, stepped by the optimiser: `local` itself, or what `local` is cast from."""
    master: Tensor
    """float32, in the replica's memory on the host; on the CPU `value` is the same."""
    lo: int
    hi: int
    shape: tuple[int, ...]
    cut: tuple[slice, ...]
    """The position of the piece in the whole parameter, which is [lo, hi) of a vector."""
    is_owned: bool
    """Whether this rank steps the piece and reports its gradient, if several ranks have it."""

    def of(self, vector: Tensor) -> Tensor:
        """This piece of a vector of the model's size."""
        return vector[self.lo : self.hi].view(self.shape)[self.cut]

    def elements(self) -> tuple[int, int]:
        """The range of a vector that contains this piece."""
        if self.parameter is None:
            return self.lo, self.lo
        if not self.master.is_contiguous():
            return self.lo, self.hi
        at = int(self.master.storage_offset())
        return at, at + self.master.numel()


def without_values(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy whose trained parameters are on the meta device. On the CPU it shares the frozen
    parameters with the model. Raises TaskError for a model that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise TaskError(
                f'parameter "{name}" has a hook on its gradient, and [replica] cuts that gradient '
                "over several processes",
                hint="change the gradient in the model's forward pass, for example by a hook of "
                "the module, or remove [replica]",
            )
        if parameter.requires_grad:
            memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"))
        elif device.type == "cpu":
            memo[id(parameter)] = parameter
    with calling("copying the model, copy.deepcopy"):
        return copy.deepcopy(model, memo)


def cut_by_fsdp(task: Task, model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the model by FSDP2, or as the task does. Raises TaskError."""
    if task.has("parallelize"):
        task.parallelize(model, mesh)
    else:
        frozen = {p for p in model.parameters() if not p.requires_grad}
        with calling("torch's fully_shard of the model", task.at("model")):
            for module in (*units(model), model):
                if any(parameter.requires_grad for parameter in module.parameters()):
                    fully_shard(module, mesh=mesh, ignored_params=frozen)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Each rank already weights its loss by its samples; and gloo cannot average.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def cut_by_tensors(task: Task, model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the model by tensor parallelism, or as the task does. Raises TaskError."""
    if task.has("parallelize"):
        task.parallelize(model, mesh)
        return
    plan = _expanded(task, model, task.tensor_plan(model))
    with calling("torch's parallelize_module", task.at("tensor_plan")):
        parallelize_module(model, mesh, plan)


def _expanded(task: Task, model: nn.Module, plan: Mapping[str, Any]) -> dict[str, ParallelStyle]:
    """The plan with patterns replaced by module names."""
    where, names, found = task.place("tensor_plan"), [n for n, _ in model.named_modules() if n], {}
    for pattern, style in plan.items():
        mine = [name for name in names if _matches(name, pattern)]
        if not mine:
            raise TaskError(
                f'task.tensor_plan has "{pattern:.100}", but the model has no such module',
                where=where,
                hint=f"its modules are {', '.join(names[:8])} ...",
            )
        if isinstance(style, str) and style not in STYLES:
            known = " or ".join(f'"{name}"' for name in STYLES)
            raise TaskError(
                f'task.tensor_plan has "{style:.100}" for {pattern:.100}',
                where=where,
                hint=f"use {known}, or a style of torch.distributed.tensor.parallel",
            )
        for name in mine:
            found[name] = STYLES[style]() if isinstance(style, str) else style
    return found


def _matches(name: str, pattern: str) -> bool:
    """A * matches one part of a name, or some of it."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def pieces(
    task: Task, model: nn.Module, layout: Layout, vector: Tensor, device: torch.device, rank: int
) -> list[ModelSlice]:
    """Load the values of a cut model. Returns this rank's piece of each parameter, in the order of
    the layout. vector: float32[d] in the replica's memory. Raises TaskError.
    """
    with calling("moving the model to the device", task.at("model")):
        move_untrained(model, device)
    made: dict[str, nn.Parameter] = {}
    for entry, lo, hi in layout.slices(TRAINED):
        parameter = find(model, entry.name)
        assert isinstance(parameter, nn.Parameter)
        master = vector[lo:hi].view(entry.shape)[_where(parameter)]
        local = master.to(device, parameter.dtype).contiguous()
        if isinstance(parameter, DTensor):
            mesh, how = parameter.device_mesh, parameter.placements
            local = DTensor.from_local(
                local, mesh, how,
                run_check=False, shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
        for name in (entry.name, *entry.aliases):
            made[name] = nn.Parameter(local) if name == entry.name else made[entry.name]
    with calling("loading the values of the model", task.at("model")):
        model.load_state_dict(made, strict=False, assign=True)
    found = []
    for entry, lo, hi in layout.slices(TRAINED):
        parameter = find(model, entry.name)
        assert isinstance(parameter, nn.Parameter)
        local = parameter.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        where, is_owned = _where(parameter), _is_owned(parameter, rank)
        found.append(piece(parameter, local, entry.shape, lo, hi, where, vector, is_owned))
    return found


def move_untrained(model: nn.Module, device: torch.device) -> None:
    """Move what has values: buffers and frozen parameters."""
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, buffer.to(device))
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)


def _where(parameter: Tensor) -> tuple[slice, ...]:
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, n) for n in parameter.shape)
    mesh, placements = parameter.device_mesh, parameter.placements
    sizes, begins = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return tuple(slice(lo, lo + n) for lo, n in zip(begins, sizes, strict=True))


def _is_owned(parameter: Tensor, rank: int) -> bool:
    if not isinstance(parameter, DTensor):
        return rank == 0
    at = parameter.device_mesh.get_coordinate()
    assert at is not None
    held = zip(at, parameter.placements, strict=True)
    return all(n == 0 for n, placement in held if isinstance(placement, Replicate))


def piece(
    parameter: nn.Parameter,
    local: Tensor,
    shape: tuple[int, ...],
    lo: int,
    hi: int,
    cut: tuple[slice, ...],
    vector: Tensor,
    is_owned: bool,
) -> ModelSlice:
    """Make a slice of these tensors. On the CPU the optimiser steps the values in the replica's
    memory; the model uses the same memory if possible, otherwise a copy of another form or dtype.
    """
    master = vector[lo:hi].view(shape)[cut]
    if local.device.type == "cpu":
        is_same = local.dtype is torch.float32 and local.data_ptr() == master.data_ptr()
        value, local = master, master if is_same else local
    else:
        value = local if local.dtype is torch.float32 else local.float()
    return ModelSlice(parameter, local, value, master, lo, hi, shape, cut, is_owned)
