"""Copies of the tensors of a replica that is several processes (`ranks.py`); rank 0 has vectors.

DDP's tensors are the same in all ranks: rank 0 reads its own, and writes to all. Those of FSDP2
(DTensor) are cut: all ranks put one of them together after the other, and cut it again, so that no
process but rank 0 holds more than one whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from daemons.attach.ranks import GroupRanks, explained
from daemons.attach.tensor_copies import read, write
from dlctl.errors import DlctlError

BUCKET_BYTES = 1 << 24
"""Values are sent to the other ranks in pieces of about this size."""


class GroupCopies:
    def __init__(self, ranks: GroupRanks) -> None:
        self._ranks = ranks
        self.leads = ranks.rank == 0

    def read(self, into: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> None:
        plain: list[tuple[Tensor, Tensor | None]] = []
        for slot, tensor in zip(into, tensors, strict=True):
            if isinstance(tensor, DTensor):
                whole = self.whole(tensor)
                if whole is not None:
                    read([slot], [whole])
            else:
                plain.append((slot, tensor))
        if self.leads:
            read([slot for slot, _ in plain], [tensor for _, tensor in plain])

    def write(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        plain: list[tuple[Tensor, Tensor]] = []
        for tensor, value in zip(tensors, values, strict=True):
            if isinstance(tensor, DTensor):
                self._scatter(tensor, value)
            else:
                plain.append((tensor, value))
        for bucket in _buckets(plain):
            self._broadcast([tensor for tensor, _ in bucket], [value for _, value in bucket])

    @torch.no_grad()
    def _scatter(self, tensor: DTensor, value: Tensor) -> None:
        device = tensor.to_local().device
        whole = value.to(device) if self.leads else torch.empty(tensor.shape, device=device)
        with explained("giving each rank its part of a tensor"):
            parts = distribute_tensor(whole.contiguous(), tensor.device_mesh, tensor.placements)
        tensor.to_local().copy_(parts.to_local())

    def _broadcast(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        if self.leads:
            flat = torch.cat([value.reshape(-1).float() for value in values])
        else:
            sizes = (tensor.numel() for tensor in tensors)
            flat = torch.empty(sum(sizes), dtype=torch.float32, device="cpu")
        self._ranks.broadcast(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        write(tensors, [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)])

    def whole(self, tensor: Tensor) -> Tensor | None:
        if isinstance(tensor, DTensor):
            with torch.no_grad(), explained("putting a tensor together"):
                whole: Tensor = tensor.full_tensor()
            tensor = whole.detach()
        return tensor if self.leads else None

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor) or whole.shape != like.shape:
            return whole
        on_device = whole.to(like.to_local().device)
        return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_mesh(name: str, tensor: Tensor, ranks: GroupRanks) -> None:
    """Raises DlctlError for a DTensor that is not cut over exactly these ranks, from rank 0 on."""
    if not isinstance(tensor, DTensor):
        return
    mesh = tensor.device_mesh
    begins_here = not any(mesh.get_coordinate() or [1])
    if mesh.size() != ranks.count or begins_here != (ranks.rank == 0):
        raise DlctlError(
            f'parameter "{name}" is cut over {mesh.size()} processes, and the group of this '
            f"replica has {ranks.count}",
            hint="give dlctl.attach the group over which the model is cut, in the order of its "
            "ranks",
        )


def _buckets(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    bucket: list[tuple[Tensor, Tensor]] = []
    size = 0
    for pair in pairs:
        bucket.append(pair)
        size += 4 * pair[0].numel()
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
