"""Serialises tensors in lists, tuples and dicts, to send them between the ranks of a replica: as a
form in JSON, and the tensors one by one. Other types cannot be sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from daemons.worker.task.user_task import TaskError, dtype_name
from dlctl.wire.messages import Array


def taken_apart(value: Any, tensors: list[Tensor]) -> Any:
    """The form of a value; appends its tensors and arrays to `tensors`. Raises TaskError."""
    if isinstance(value, Tensor | np.ndarray):
        tensors.append(value if isinstance(value, Tensor) else torch.from_numpy(value))
        return ["tensor" if isinstance(value, Tensor) else "array"]
    if value is None or type(value) in (bool, int, float, str):
        return ["plain", value]
    if type(value) in (list, tuple):
        return [type(value).__name__, [taken_apart(each, tensors) for each in value]]
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return ["dict", [[key, taken_apart(each, tensors)] for key, each in value.items()]]
    raise TaskError(
        f"a value of type {type(value).__name__} cannot be sent between the processes of a replica",
        hint="use tensors, arrays, numbers and text in lists, tuples and plain dicts; a collate of "
        "the task's may return dict(batch)",
    )


def put_together(form: Any, tensors: Iterator[Tensor]) -> Any:
    """The inverse of `taken_apart`."""
    match form:
        case ["tensor"]:
            return next(tensors)
        case ["array"]:
            return next(tensors).numpy()
        case ["plain", value]:
            return value
        case ["list", items]:
            return [put_together(item, tensors) for item in items]
        case ["tuple", items]:
            return tuple(put_together(item, tensors) for item in items)
        case ["dict", items]:
            return {key: put_together(item, tensors) for key, item in items}
    raise ValueError(f"unknown form: {form!r:.100}")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name from `dtype_name`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def packed(value: Any) -> tuple[Any, list[Array]]:
    """The form of a value, and its tensors as bytes: numpy lacks some dtypes."""
    tensors: list[Tensor] = []
    form = taken_apart(value, tensors)
    kinds = [[dtype_name(tensor), list(tensor.shape)] for tensor in tensors]
    flat = [tensor.detach().cpu().contiguous().reshape(-1) for tensor in tensors]
    return [form, kinds], [tensor.view(torch.uint8).numpy() for tensor in flat]


def unpacked(form: Any, arrays: Sequence[Array]) -> Any:
    """The inverse of `packed`."""
    tensors = [
        torch.from_numpy(array).view(dtype_of(name)).view(shape)
        if array.size
        else torch.empty(shape, dtype=dtype_of(name), device="cpu")
        for array, (name, shape) in zip(arrays, form[1], strict=True)
    ]
    return put_together(form[0], iter(tensors))
