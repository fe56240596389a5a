"""The two sides of a matrix that its optimiser has a matrix for: L of its rows, R of its columns.

A side that is too long has none: a decomposition costs the third power of its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dlctl.model.flat import TensorEntry
from dlctl.wire.messages import Array

LEFT, RIGHT = "L", "R"


class Sides:
    """For a `MatrixOptimizer` with the option `max_dim`."""

    options: Any

    def is_matrix(self, entry: TensorEntry) -> bool:
        is_matrix: bool = super().is_matrix(entry)  # type: ignore[misc]
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


def remarks_of(
    entries: Iterable[TensorEntry], is_left: Callable[[TensorEntry], bool], max_dim: int
) -> list[str]:
    """A sentence for each matrix with a side that is too long. is_left: whether the options say
    that it is none."""
    found = []
    for entry in entries:
        if len(entry.shape) == 2 and max(entry.shape) > max_dim and not is_left(entry):
            rows, columns = entry.shape
            what = f"its side of {max(entry.shape):,} keeps the identity"
            if min(entry.shape) > max_dim:
                what = f"AdamW steps it: both sides, {rows:,} and {columns:,}, keep the identity"
            found.append(f"{entry.name}: {what}, as [optimizer] max_dim is {max_dim:,}")
    return found
