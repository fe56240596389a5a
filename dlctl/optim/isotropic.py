"""Nesterov's momentum along isotropic matrices: the outer rule of IsoLoCo
(github.com/shoroi/isoloco), as an optimiser of the servers.

    g = U diag(S) V^T, the singular value decomposition of a matrix:   h = mean(S) U V^T
    m = momentum * m + h;   w -= lr * (h + momentum * m)

So all directions of the mean displacement are as long as they are on average. For everything else,
and for a matrix whose shorter side is longer than `max_dim`, h = g. A direction whose singular
value is below the rounding of the largest is none, and stays out of h.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le

from dlctl.job.config import STRICT
from dlctl.model.flat import TensorEntry
from dlctl.optim.blocks import Block, Rule
from dlctl.optim.matrices import Decay, MatrixOptimizer, Next, Whole, WholeOptions
from dlctl.util.numeric_limits import LearningRate
from dlctl.util.threads import scratch
from dlctl.wire.messages import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class IsotropicOptions(WholeOptions):
    __pydantic_config__ = STRICT

    lr: LearningRate = 1.0
    """Learning rate. Changes live."""
    momentum: Decay = 0.8
    """Decay of the previous sum."""
    nesterov: bool = True
    """Look ahead: step along h plus the decayed new sum."""
    max_dim: Annotated[int, Ge(1), Le(100_000)] = 10_000
    """The longest shorter side of a matrix that is decomposed: it costs the square of that times
    the other side. A larger one is stepped as it is."""


class Isotropic(MatrixOptimizer):
    """Slot "momentum"."""

    Options: ClassVar[type[Any]] = IsotropicOptions
    options: IsotropicOptions

    def __init__(self, options: IsotropicOptions) -> None:
        super().__init__(options, "momentum")

    def is_matrix(self, entry: TensorEntry) -> bool:
        return super().is_matrix(entry) and min(entry.shape) <= self.options.max_dim

    def remarks(self) -> list[str]:
        return [
            f"{entry.name}: of {entry.shape[0]:,} x {entry.shape[1]:,}, it is not decomposed, as "
            f"[optimizer] max_dim is {self.options.max_dim:,}"
            for entry in self.entries
            if MatrixOptimizer.is_matrix(self, entry)
            and not self.is_matrix(entry)
            and not self.is_left(entry)
        ]

    def step(self, at: Whole) -> Next:
        h, momentum = isotropic(at.g), np.float32(self.options.momentum)
        m = momentum * at.slots["momentum"] + h
        way = h + momentum * m if self.options.nesterov else m
        w = at.w * np.float32(1 - at.lr * at.weight_decay) - np.float32(at.lr) * way
        return Next(w, {"momentum": m}, {})

    def rest(self, lr_scale: float, weight_decay: float, number: int) -> Rule:
        rate, momentum = self.lr * lr_scale, np.float32(self.options.momentum)
        is_ahead = self.options.nesterov

        def update(blocks: Iterable[Block]) -> None:
            for _, w, g, (m,), w_next, (m_next,) in blocks:
                np.multiply(m, momentum, out=m_next)
                m_next += g
                way = scratch(g.size)
                if is_ahead:
                    np.multiply(m_next, momentum, out=way)
                    way += g
                    way *= np.float32(rate)
                else:
                    np.multiply(m_next, np.float32(rate), out=way)
                if weight_decay:
                    w = np.multiply(w, np.float32(1 - rate * weight_decay), out=w_next)
                np.subtract(w, way, out=w_next)

        return update


def isotropic(matrix: Array) -> Array:
    """float32[m, n]: all its singular values replaced by their mean. Computed in float64."""
    u, s, vt = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    none = s <= max(matrix.shape) * np.finfo(np.float32).eps * s.max(initial=0.0)
    u[:, none] = 0
    found: Array = (s.mean() * (u @ vt)).astype(np.float32)
    return found
