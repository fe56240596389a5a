"""Copies between the user's tensors and vectors in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from daemons.worker.replica import put_together


class Copies(Protocol):
    """How a replica's tensors are copied: it may be several processes (`group_copies.py`)."""

    leads: bool
    """This process has the vectors. Else it is a later rank, which only takes part."""

    def read(self, into: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> None:
        """Copy tensors of any dtype, stride and device to contiguous float32 ones in host memory;
        zeros for missing ones.
        """
        ...

    def write(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Copy values in host memory to tensors of any dtype, stride and device."""
        ...

    def whole(self, tensor: Tensor) -> Tensor | None:
        """The tensor with all of its values; None: this process has no use for it."""
        ...

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """What this process has of a tensor that all have whole, if it is cut as another one."""
        ...

    def local(self, tensor: Tensor) -> Tensor:
        """What this process has of it, as a plain tensor."""
        ...


class OwnCopies:
    """Of a replica that is one process."""

    leads = True

    def read(self, into: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> None:
        read(into, tensors)

    def write(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        write(tensors, values)

    def whole(self, tensor: Tensor) -> Tensor | None:
        return tensor

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        return whole

    def local(self, tensor: Tensor) -> Tensor:
        return tensor


def is_far(tensor: Tensor) -> bool:
    """Whether it is not in host memory."""
    return tensor.device.type != "cpu"


@torch.no_grad()
def read(into: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> None:
    """See `Copies.read`."""
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
def write(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """See `Copies.write`."""
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
