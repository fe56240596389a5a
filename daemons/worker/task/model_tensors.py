"""The tensors of a model, by their names in `state_dict`: parameters, buffers, tied tensors.

`model.state_dict()` defines what belongs to the model, because an export must fit it: it leaves out
buffers that are not persistent. State that is no tensor (`get_extra_state`) is left out as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from daemons.worker.task.user_task import TaskError, calling, dtype_name
from dlctl.model import frozen
from dlctl.model.flat import AVERAGED, CONSTANT, TRAINED, Layout, TensorEntry

_TRAINED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGER_MAX = 2**53
"""Buffers travel as float64: integers beyond this would be rounded."""


def layout_of(model: nn.Module, tables: tuple[TensorEntry, ...] = ()) -> Layout:
    """The layout of a model, in the order of its state_dict; behind it the tables of rows.

    A tensor with several names has one entry; its other names are aliases. Raises TaskError for a
    model that cannot be laid out; the caller sets its `where`.
    """
    found = _tensors(model)
    trained = [(names[0], tensor) for tensor, names in found if kind(tensor) == TRAINED]
    _check_complete(model, {id(tensor) for tensor, _ in found}, is_empty=not (trained or tables))
    _check_no_overlap(trained)
    for tensor, (name, *_) in found:
        _check(name, tensor)
    if both := {name for _, names in found for name in names} & {table.name for table in tables}:
        raise TaskError(
            f'"{min(both):.80}" is a tensor of the model and a table of task.tables()',
            hint="rename the table: an export has both under their names",
        )
    entries = [
        TensorEntry(name, kind(tensor), tuple(tensor.shape), dtype_name(tensor), tuple(aliases))
        for tensor, (name, *aliases) in found
    ]
    return Layout((*entries, *tables))


def kind(tensor: Tensor) -> str:
    """TRAINED, CONSTANT or AVERAGED."""
    if not isinstance(tensor, nn.Parameter):
        return AVERAGED
    return TRAINED if tensor.requires_grad else CONSTANT


def find(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of that name, as it is now: a forward pass may replace buffers.
    Raises TaskError if the task has removed it.
    """
    tensor = _look_up(model, name)
    if not isinstance(tensor, Tensor):
        raise TaskError(f'"{name}" was removed from the model after model() had returned')
    return tensor


def _look_up(model: nn.Module, name: str) -> object:
    path, _, key = name.rpartition(".")
    try:
        return getattr(model.get_submodule(path), key)
    except AttributeError:
        return None


def describe(tensor: Tensor) -> str:
    return "parameter" if isinstance(tensor, nn.Parameter) else "buffer"


def _tensors(model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Each tensor, with all its names."""
    with calling("model.state_dict()"):
        state = model.state_dict(keep_vars=True)
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            continue
        if _look_up(model, name) is not tensor:
            raise TaskError(f'model.state_dict() has "{name}", which is no tensor of the model')
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return [*found.values()]


def _check_complete(model: nn.Module, tensors: set[int], *, is_empty: bool) -> None:
    """tensors: the ids of those in the state_dict."""
    if is_empty:
        raise TaskError(
            "the model has nothing to train", hint="no parameter of it has requires_grad=True"
        )
    for name, parameter in model.named_parameters():
        if id(parameter) not in tensors:
            raise TaskError(f'parameter "{name}" is not in model.state_dict()')


def _check(name: str, tensor: Tensor) -> None:
    what = f'{describe(tensor)} "{name}"'
    if is_lazy(tensor):
        raise TaskError(
            f"{what} has no shape yet",
            hint="let model() run one batch through its lazy modules before it returns the model",
        )
    if tensor.is_complex() or tensor.is_quantized or tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise TaskError(
            f"{what} is {dtype_name(tensor)} ({layout}); only real, dense tensors can be trained"
        )
    if kind(tensor) == TRAINED and tensor.dtype not in _TRAINED_DTYPES:
        raise TaskError(
            f"{what} is {dtype_name(tensor)}",
            hint="train in float32, bfloat16, float16 or float64, or set requires_grad=False",
        )
    if kind(tensor) == CONSTANT:
        if dtype_name(tensor) not in frozen.DTYPES:
            raise TaskError(f"{what} is {dtype_name(tensor)}, which cannot be stored")
    elif not tensor.is_floating_point() and tensor.dtype is not torch.bool and tensor.numel():
        largest = max(abs(int(tensor.min())), abs(int(tensor.max())))
        if largest > _INTEGER_MAX:
            raise TaskError(
                f"{what} holds {largest}, too large an integer to travel without rounding",
                hint="register it as a buffer with persistent=False and compute it in model()",
            )


def _check_no_overlap(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises TaskError for parameters that share memory: the flat vector would separate them."""
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + _extent_bytes(tensor), name)
        for name, tensor in named
        if not is_lazy(tensor)
        and tensor.layout is torch.strided
        and tensor.numel()
        # One that is made up of others, as FSDP2's, has no memory.
        and not hasattr(tensor, "__tensor_flatten__")
    )
    for before, after in itertools.pairwise(spans):
        if before[0] == after[0] and before[2] > after[1]:
            raise TaskError(
                f'parameters "{before[3]}" and "{after[3]}" share memory but are two parameters',
                hint="tie them by assignment: self.head.weight = self.embedding.weight",
            )


def _extent_bytes(tensor: Tensor) -> int:
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
