"""Tensors between the parties: each is two arrays, its elements and int64[n], its shape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dlctl.wire.messages import Array

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def sent(tensor: Tensor) -> tuple[Array, Array]:
    """The arrays of a tensor: whole numbers as int64, all others as float32."""
    kind = torch.int64 if tensor.dtype in WHOLE else torch.float32
    values = tensor.detach().to("cpu", kind).contiguous().numpy().reshape(-1)
    return values, np.array(tensor.shape, np.int64)


def received(elements: Array, shape: Array) -> Tensor:
    """The tensor, with memory of its own."""
    return torch.from_numpy(np.array(elements)).reshape(shape.tolist())


def all_received(arrays: Sequence[Array]) -> list[Tensor]:
    return [received(*arrays[at : at + 2]) for at in range(0, len(arrays), 2)]


def described(tensor: Tensor) -> str:
    """The dtype and the shape of a sample: "float32[128]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape[1:])}"
