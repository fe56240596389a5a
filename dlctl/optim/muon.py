"""Muon: steps along the nearest orthogonal matrix. Jordan 2024; the same as torch.optim.Muon.

    m = momentum * m + (1 - momentum) * g;   u = g + momentum * (m - g)  (nesterov), else m
    X = u / |u|, transposed if it is tall;   5 times:  A = X X^T;  X = a X + (b A + c A^2) X
    w *= 1 - lr * weight_decay;   w -= lr * sqrt(max(1, rows / columns)) * X

with (a, b, c) = (3.4445, -4.775, 2.0315). The products are in float32: bfloat16, as in torch, gives
directions that the gradient has not. Matrices are two-dimensional parameters; AdamW steps all
others, and those that `elementwise` names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Gt, Le

from dlctl.job.config import STRICT
from dlctl.optim.matrices import Decay, Next, Whole
from dlctl.optim.matrices_and_adam import MatricesAndAdam, MatrixOptions
from dlctl.util.numeric_limits import LearningRate, WeightDecay
from dlctl.wire.messages import Array

A, B, C = 3.4445, -4.775, 2.0315
LEAST_NORM = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonServerOptions(MatrixOptions):
    __pydantic_config__ = STRICT

    lr: LearningRate = 0.02
    """Learning rate of matrices: the length of a step in each direction. Changes live."""
    momentum: Decay = 0.95
    """Decay of the mean gradient of a matrix per update."""
    nesterov: bool = True
    """Look ahead: step along a mean that has the gradient once more."""
    ns_steps: Annotated[int, Ge(1), Le(20)] = 5
    """Iterations of Newton and Schulz."""
    adjust_lr: Literal["original", "match_rms_adamw"] = "original"
    """How the step depends on the shape of a matrix; "match_rms_adamw": lr is as for AdamW."""
    weight_decay: WeightDecay = 0.1
    """w shrinks by lr times this at each update, which is at most 1."""
    adamw_lr_scale: Annotated[float, Gt(0), Le(1000)] = 0.05
    """The rate of AdamW, in multiples of lr."""
    elementwise: tuple[str, ...] = ("*embed*", "*wte*", "*wpe*", "*lm_head*")
    """Patterns of the names of matrices that AdamW steps instead: embeddings, and the last layer of
    a language model."""


class Muon(MatricesAndAdam):
    """Slots "mean", and "square" for AdamW."""

    Options: ClassVar[type[Any]] = MuonServerOptions
    options: MuonServerOptions

    def adam_rate(self) -> float:
        return self.options.adamw_lr_scale

    def step(self, at: Whole) -> Next:
        momentum = np.float32(self.options.momentum)
        mean = at.slots["mean"] + (1 - momentum) * (at.g - at.slots["mean"])
        u = at.g + momentum * (mean - at.g) if self.options.nesterov else mean
        rows, columns = at.entry.shape
        if self.options.adjust_lr == "original":
            scale = math.sqrt(max(1.0, rows / columns))
        else:
            scale = 0.2 * math.sqrt(max(rows, columns))
        w = at.w * np.float32(1 - at.lr * at.weight_decay)
        w -= np.float32(at.lr * scale) * orthogonal(u, self.options.ns_steps)
        return Next(w, {"mean": mean}, {})


def orthogonal(u: Array, steps: int) -> Array:
    """float32[m, n]: about U V^T of the singular value decomposition of u."""
    x = u.T if u.shape[0] > u.shape[1] else u
    x = x / max(np.float32(np.linalg.norm(x)), np.float32(LEAST_NORM))
    for _ in range(steps):
        a = x @ x.T
        x = np.float32(A) * x + (np.float32(B) * a + np.float32(C) * (a @ a)) @ x
    return x.T if u.shape[0] > u.shape[1] else x
