"""Steps along a linear minimisation oracle: of the spectral norm for matrices. Maranjyan et al.,
"Ringmaster LMO", 2026 (arXiv 2605.18174), in the form of its authors' code.

    B = beta B + (1 - beta) g;   u = beta B + (1 - beta) g
    X = u / |u|, transposed if it is tall;   5 times:  A = X X^T;  X = a X + (b A + c A^2) X
    x -= lr * sqrt(max(1, rows / columns)) * X        for everything else:  x -= lr * u

A tensor of more than two dimensions is a matrix of its first one and all others. (a, b, c) differ
from iteration to iteration: the Polar Express (Amsel et al. 2025), which comes nearer to U V^T than
Newton and Schulz in as many. All of it is in float32.

Without parameters, where a method asks for that, with k updates so far: beta = 1 - 1 / sqrt(k), and
0 at first; the rate is lr / (k + 1)^(3/4).
"""

from __future__ import annotations

import math
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

POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
LEAST_NORM = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class LmoOptions(WholeOptions):
    __pydantic_config__ = STRICT

    lr: LearningRate = 0.02
    """Learning rate: the length of a step in each direction of a matrix. Changes live."""
    momentum: Decay = 0.95
    """Decay of the mean gradient per update, beta."""
    steps: Annotated[int, Ge(1), Le(5)] = 5
    """Iterations of the Polar Express."""


class Lmo(MatrixOptimizer):
    """Slot "mean", B."""

    Options: ClassVar[type[Any]] = LmoOptions
    options: LmoOptions

    def __init__(self, options: LmoOptions) -> None:
        super().__init__(options, "mean")
        self.is_parameter_free = False
        """Set by a method, before the first update."""

    def is_matrix(self, entry: TensorEntry) -> bool:
        return len(entry.shape) >= 2

    def step(self, at: Whole) -> Next:
        part = self._part(at.number)
        mean = at.slots["mean"] + part * (at.g - at.slots["mean"])
        u = mean + part * (at.g - mean)
        rows, columns = u.shape
        rate = self._rate(at.lr, at.number)
        w = at.w * np.float32(1 - rate * at.weight_decay)
        longer = math.sqrt(max(1.0, rows / columns))
        w -= np.float32(rate * longer) * polar(u, self.options.steps)
        return Next(w, {"mean": mean}, {})

    def rest(self, lr_scale: float, weight_decay: float, number: int) -> Rule:
        rate, part = self._rate(self.lr * lr_scale, number), self._part(number)

        def update(blocks: Iterable[Block]) -> None:
            for _, w, g, (mean,), w_next, (mean_next,) in blocks:
                u = scratch(g.size)
                np.subtract(g, mean, out=u)
                u *= part
                np.add(mean, u, out=mean_next)
                np.subtract(g, mean_next, out=u)
                u *= part
                u += mean_next
                u *= np.float32(rate)
                if weight_decay:
                    w = np.multiply(w, np.float32(1 - rate * weight_decay), out=w_next)
                np.subtract(w, u, out=w_next)

        return update

    def _part(self, number: int) -> np.float32:
        """The weight of the gradient in the mean, 1 - beta."""
        if self.is_parameter_free:
            return np.float32(1 / math.sqrt(max(1, number - 1)))
        return np.float32(1 - self.options.momentum)

    def _rate(self, lr: float, number: int) -> float:
        return lr / float(number**0.75) if self.is_parameter_free else lr


def polar(u: Array, steps: int) -> Array:
    """float32[m, n]: about U V^T of the singular value decomposition of u. NaN if its norm is not
    finite: a shard detects that.
    """
    x = u.T if u.shape[0] > u.shape[1] else u
    norm = np.float32(np.linalg.norm(x) + LEAST_NORM)
    x = x / norm if np.isfinite(norm) else np.full_like(x, np.nan)
    for a, b, c in POLAR_EXPRESS[:steps]:
        gram = x @ x.T
        x = np.float32(a) * x + (np.float32(b) * gram + np.float32(c) * (gram @ gram)) @ x
    return x.T if u.shape[0] > u.shape[1] else x
