"""SOAP: Adam in the eigenbasis of Shampoo's matrices. Vyas et al., ICLR 2025 (arXiv 2409.11321).

The first update only begins L and R, their eigenvectors QL and QR, and steps nothing. From then on,
with t counted from 1:

    g' = QL^T g QR;   m += (1 - beta1) (g - m);   v += (1 - beta2) (g'^2 - v)
    w -= lr sqrt(1 - beta2^t) / (1 - beta1^t) QL [QL^T m QR / (sqrt(v) + eps)] QR^T
    w -= lr * weight_decay * w
    L += (1 - shampoo_beta) (g g^T - L),   R likewise with g^T g
    each `frequency` updates:  M = L QL;  order = descending diag(QL^T M);  QL = qr(M[:, order])
                               and v is permuted alike;  QR likewise

A side of more than `max_dim` has no matrix: its basis is the identity. All but matrices is stepped
by AdamW, which begins with the second update as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le

from dlctl.job.config import STRICT
from dlctl.model.flat import TensorEntry
from dlctl.optim.matrices import Decay, Next, Shapes, Whole
from dlctl.optim.matrices_and_adam import MatricesAndAdam, MatrixOptions
from dlctl.optim.sides import LEFT, RIGHT, Sides, gram, remarks_of
from dlctl.util.numeric_limits import LearningRate
from dlctl.wire.messages import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class SoapOptions(MatrixOptions):
    __pydantic_config__ = STRICT

    lr: LearningRate = 0.003
    """Learning rate: about the size of a step. Changes live."""
    beta1: Decay = 0.95
    """Decay of the mean gradient per update."""
    beta2: Decay = 0.95
    """Decay of the mean square, in the eigenbasis, per update."""
    shampoo_beta: Decay = 0.95
    """Decay of L and R per update."""
    frequency: Annotated[int, Ge(1), Le(100_000)] = 10
    """Updates from one change of the eigenbasis to the next."""
    max_dim: Annotated[int, Ge(1), Le(100_000)] = 10_000
    """The longest side of a matrix that has a basis of its own: it costs the third power of that.
    A longer one keeps the identity."""


class Soap(Sides, MatricesAndAdam):
    """Slots "mean" and "rotated_square"; L, R, QL and QR of each matrix beside it."""

    Options: ClassVar[type[Any]] = SoapOptions
    SQUARE: ClassVar[str] = "rotated_square"
    WARMUP: ClassVar[int] = 1
    options: SoapOptions

    def shapes(self, entry: TensorEntry) -> Shapes:
        return self.square_shapes(entry, (("L", "QL"), ("R", "QR")))

    def remarks(self) -> list[str]:
        return remarks_of(self.entries, self.is_left, self.options.max_dim)

    def step(self, at: Whole) -> Next:
        grams = self._grams(at)
        bases = {f"Q{side}": at.kept[f"Q{side}"] for side in grams}
        # After a resume from another optimiser there may be a mean, but no basis yet.
        if at.number == 1 or not all(basis.any() for basis in bases.values()):
            first = {f"Q{side}": _descending_basis(matrix) for side, matrix in grams.items()}
            return Next(at.w, {}, {**grams, **first})
        o, t = self.options, at.number - 1
        mean = at.slots["mean"] + np.float32(1 - o.beta1) * (at.g - at.slots["mean"])
        square = at.slots[self.SQUARE]
        rotated = _into(at.g, bases)
        square = square + np.float32(1 - o.beta2) * (rotated * rotated - square)
        direction = _out_of(_into(mean, bases) / (np.sqrt(square) + np.float32(o.eps)), bases)
        rate = at.lr * math.sqrt(1 - o.beta2**t) / (1 - o.beta1**t)
        w = at.w - np.float32(rate) * direction
        w *= np.float32(1 - at.lr * at.weight_decay)
        if t % o.frequency == 0:
            for axis, side in enumerate((LEFT, RIGHT)):
                if side in grams:
                    basis, order = _turned(grams[side], bases[f"Q{side}"])
                    square, bases[f"Q{side}"] = np.take(square, order, axis), basis
            grams |= bases
        return Next(w, {"mean": mean, self.SQUARE: square}, grams)

    def _grams(self, at: Whole) -> dict[str, Array]:
        part = np.float32(1 - self.options.shampoo_beta)
        return {
            side: at.kept[side] + part * (gram(at.g, side) - at.kept[side])
            for side in (LEFT, RIGHT)
            if side in at.kept
        }


def _descending_basis(matrix: Array) -> Array:
    """Its eigenvectors as columns, those of the largest eigenvalues first."""
    _, vectors = np.linalg.eigh(matrix)
    return np.ascontiguousarray(vectors[:, ::-1])


def _turned(matrix: Array, basis: Array) -> tuple[Array, Array]:
    """One step of the power iteration: the next basis, and the order that it has now."""
    product = matrix @ basis
    order = np.argsort(-(basis * product).sum(0), kind="stable")
    return np.linalg.qr(product[:, order])[0], order


def _into(values: Array, bases: dict[str, Array]) -> Array:
    values = bases["QL"].T @ values if "QL" in bases else values
    return values @ bases["QR"] if "QR" in bases else values


def _out_of(values: Array, bases: dict[str, Array]) -> Array:
    values = bases["QL"] @ values if "QL" in bases else values
    return values @ bases["QR"].T if "QR" in bases else values
