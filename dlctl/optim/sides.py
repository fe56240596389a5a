"""The two sides of a matrix that its optimiser has a matrix for: L of its rows, R of its columns.

A side that is too long has none: a decomposition costs the third power of its length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dlctl.model.flat import TensorEntry
from dlctl.wire.messages import Array

LEFT, RIGHT = "L", "R"


class Sides:
    """For a `MatrixOptimizer` with the option `max_dim`."""

    options: Any

    def is_whole(self, entry: TensorEntry) -> bool:
        is_matrix: bool = super().is_whole(entry)  # type: ignore[misc]
        return is_matrix and min(entry.shape) <= self.options.max_dim

    def square_shapes(
        self, entry: TensorEntry, names: Sequence[Sequence[str]]
    ) -> dict[str, tuple[int, int]]:
        """name -> [n, n] for each side of n <= max_dim; names: those of L's side, of R's side."""
        return {
            name: (n, n)
            for n, of_side in zip(entry.shape, names, strict=True)
            if n <= self.options.max_dim
            for name in of_side
        }


def gram(g: Array, side: str) -> Array:
    """g g^T or g^T g."""
    product: Array = g @ g.T if side == LEFT else g.T @ g
    return product


def remarks_of(matrices: Iterable[TensorEntry], max_dim: int) -> list[str]:
    """A sentence for each matrix with a side that is too long."""
    return [
        f"{entry.name}: its side of {max(entry.shape):,} keeps the identity, as it exceeds "
        f"[optimizer] max_dim = {max_dim:,}"
        for entry in matrices
        if max(entry.shape) > max_dim
    ]
