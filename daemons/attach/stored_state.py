"""The state of the user's objects as arrays for a checkpoint: tensors under names, and a JSON
document of everything else that says where they belong.

What is no tensor, number, text or None, nor a list, tuple or dict of these, is left out of the dict
that it is in: a function is in the user's script, and is there again after a restart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from daemons.worker.nested_tensors import dtype_of, put_together, taken_apart
from daemons.worker.task.user_task import dtype_name
from dlctl.wire.messages import Array

OMITTED = object()
"""What cannot be stored."""
_AS_THEY_ARE = frozenset({
    torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8,
})  # fmt: skip
"""Checkpoints and numpy have these dtypes. Tensors of others are stored as bytes."""


class StateWriter:
    """arrays: what was put so far."""

    def __init__(self, whole: Callable[[Tensor], Tensor | None] = lambda tensor: tensor) -> None:
        """whole: a tensor with all of its values; None: it is stored in another process."""
        self._whole = whole
        self.arrays: dict[str, Array] = {}

    def put(self, name: str, value: Any) -> Any:
        """A description of the value for the JSON document; its tensors become arrays with the name
        or, if there are several, with numbers behind it. OMITTED: it cannot be stored.
        """
        storable = plain(value)
        if storable is OMITTED:
            return OMITTED
        tensors: list[Tensor] = []
        form = taken_apart(storable, tensors)
        stored = []
        for number, tensor in enumerate(tensors):
            of_it = name if len(tensors) == 1 else f"{name}.{number}"
            if (whole := self._whole(tensor)) is not None:
                self.arrays[of_it] = _as_array(whole)
            stored.append([of_it, dtype_name(tensor), list(tensor.shape)])
        return [form, stored]

    def put_all(self, name: str, values: Mapping[Any, Any]) -> dict[str, Any]:
        """Those of the values that have text as keys, and can be stored."""
        described = {
            key: self.put(f"{name}.{key}", value)
            for key, value in values.items()
            if isinstance(key, str)
        }
        return {key: each for key, each in described.items() if each is not OMITTED}


def as_document(described: Any) -> Array:
    """uint8[n]"""
    return np.frombuffer(json.dumps(described).encode(), np.uint8)


def of_document(array: Array) -> Any:
    return json.loads(array.tobytes())


def value_of(
    described: Any, arrays: Mapping[str, Array], place: Callable[[Tensor], Tensor] = lambda t: t
) -> Any:
    """A value as it was put. place: where its tensors are to be."""
    form, stored = described
    tensors = (place(_as_tensor(arrays[name], kind, shape)) for name, kind, shape in stored)
    return put_together(form, tensors)


def values_of(described: Mapping[str, Any], arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Values as they were put by `put_all`."""
    return {key: value_of(each, arrays) for key, each in described.items()}


def plain(value: Any) -> Any:
    """The value in Python's own types and tensors; OMITTED if that is impossible."""
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, Tensor):
        return value
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, list | tuple):
        items = [plain(each) for each in value]
        kind = tuple if isinstance(value, tuple) else list
        return OMITTED if any(each is OMITTED for each in items) else kind(items)
    if isinstance(value, dict):
        pairs = {key: plain(each) for key, each in value.items() if type(key) in (str, int)}
        return {key: each for key, each in pairs.items() if each is not OMITTED}
    return OMITTED


def _as_array(tensor: Tensor) -> Array:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    if tensor.dtype in _AS_THEY_ARE:
        return dense.cpu().numpy()
    return dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _as_tensor(array: Array, kind: str, shape: list[int]) -> Tensor:
    """A copy, in host memory."""
    tensor = torch.from_numpy(np.array(array, order="C"))
    dtype = dtype_of(kind)
    return (tensor if tensor.dtype is dtype else tensor.view(dtype)).view(shape)
