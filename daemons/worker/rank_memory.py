"""Host memory that all ranks of a replica share: vectors of the model's size, of which each rank
writes and reads its own parts.

It is one file without a name, which the ranks inherit, so nothing is left when they have ended.
Pages that nobody has touched take no memory.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

PARAMETERS, GRADIENT, GIVEN = 0, 1, 2
"""The numbers of the vectors: what is trained; a gradient of the whole replica; a vector that rank
0 has for all of them.
"""
STATES = 3
"""From here on: what optimisers keep of each element."""
VECTORS = STATES + 6


class RankMemory:
    """VECTORS times float32[size]."""

    def __init__(self, file: int, size: int) -> None:
        """file: one that all ranks have open. Raises OSError."""
        self.size = size
        self._stride = -(-4 * size // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(file, VECTORS * self._stride)
        self._memory = mmap.mmap(file, VECTORS * self._stride)

    def vector(self, number: int) -> Tensor:
        """float32[size]."""
        at = number * self._stride
        return torch.frombuffer(self._memory, dtype=torch.float32, count=self.size, offset=at)
