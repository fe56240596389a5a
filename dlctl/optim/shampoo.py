"""Shampoo: a preconditioner for each side of a matrix. Gupta et al., ICML 2018 (arXiv 1802.09568);
running means, and the length of Adam's step, as in Anil et al. 2020 and Shi et al. 2023.

    m += (1 - beta1) (g - m);   v += (1 - beta2) (g^2 - v);   both divided by 1 - beta^t: m', v'
    L += (1 - shampoo_beta) (g g^T - L),   R likewise with g^T g
    P = (L' + e I)^(-1/4) m' (R' + e I)^(-1/4),  L' = L / (1 - shampoo_beta^t),  e = epsilon times
    the largest eigenvalue
    w -= lr * weight_decay * w;   w -= lr |m' / (sqrt(v') + eps)| / |P| P

The roots are computed at the first update and each `frequency` updates. A side of more than
`max_dim` has no matrix: its root is the identity. With beta1 = 0, m' is the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le

from dlctl.job.config import STRICT
from dlctl.model.flat import TensorEntry
from dlctl.optim.matrices import Decay, Next, Shapes, Whole
from dlctl.optim.matrices_and_adam import MatricesAndAdam, MatrixOptions
from dlctl.optim.sides import LEFT, RIGHT, Sides, gram, remarks_of
from dlctl.wire.messages import Array

ROOTS = {LEFT: "root_L", RIGHT: "root_R"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShampooOptions(MatrixOptions):
    __pydantic_config__ = STRICT

    shampoo_beta: Decay = 0.999
    """Decay of L and R per update."""
    epsilon: Annotated[float, Ge(1e-12), Le(1)] = 1e-6
    """Added to the eigenvalues of L and R, relative to the largest."""
    frequency: Annotated[int, Ge(1), Le(100_000)] = 10
    """Updates from one computation of the roots to the next."""
    max_dim: Annotated[int, Ge(1), Le(100_000)] = 10_000
    """The longest side of a matrix that has a preconditioner: its root costs the third power of
    that. A longer one keeps the identity."""


class Shampoo(Sides, MatricesAndAdam):
    """Slots "mean" and "square"; L, R and their roots beside each matrix."""

    Options: ClassVar[type[Any]] = ShampooOptions
    options: ShampooOptions

    def shapes(self, entry: TensorEntry) -> Shapes:
        return self.square_shapes(entry, ((LEFT, ROOTS[LEFT]), (RIGHT, ROOTS[RIGHT])))

    def remarks(self) -> list[str]:
        return remarks_of(self.entries, self.is_left, self.options.max_dim)

    def step(self, at: Whole) -> Next:
        o, t = self.options, at.number
        mean = at.slots["mean"] + np.float32(1 - o.beta1) * (at.g - at.slots["mean"])
        square = at.slots["square"] + np.float32(1 - o.beta2) * (at.g * at.g - at.slots["square"])
        kept = self._kept(at)
        true_mean = mean / np.float32(1 - o.beta1**t)
        root = np.sqrt(square / np.float32(1 - o.beta2**t))
        step = true_mean
        step = kept[ROOTS[LEFT]] @ step if LEFT in kept else step
        step = step @ kept[ROOTS[RIGHT]] if RIGHT in kept else step
        length = np.linalg.norm(true_mean / (root + np.float32(o.eps)))
        own = np.linalg.norm(step)
        w = at.w * np.float32(1 - at.lr * at.weight_decay)
        if own > 0:
            w -= np.float32(at.lr * float(length) / float(own)) * step
        return Next(w, {"mean": mean, "square": square}, kept)

    def _kept(self, at: Whole) -> dict[str, Array]:
        """L and R with this gradient, and their roots, new ones if they are due."""
        o, found = self.options, {}
        part, bias = np.float32(1 - o.shampoo_beta), 1 - o.shampoo_beta**at.number
        for side in (side for side in (LEFT, RIGHT) if side in at.kept):
            found[side] = at.kept[side] + part * (gram(at.g, side) - at.kept[side])
            root = at.kept[ROOTS[side]]
            if (at.number - 1) % o.frequency == 0 or not root.any():
                root = inverse_fourth_root(found[side] / np.float32(bias), o.epsilon)
            found[ROOTS[side]] = root
        return found


def inverse_fourth_root(matrix: Array, epsilon: float) -> Array:
    """float32[n, n]: (matrix + epsilon * its largest eigenvalue * I)^(-1/4), of a positive
    semi-definite one; of zeros the identity. The eigenvalues are computed in float64.
    """
    values, vectors = np.linalg.eigh(matrix.astype(np.float64))
    largest = float(values[-1])
    if not largest > 0:
        return np.eye(len(matrix), dtype=np.float32)
    powers = (np.maximum(values, 0.0) + epsilon * largest) ** -0.25
    root: Array = ((vectors * powers) @ vectors.T).astype(np.float32)
    return root
