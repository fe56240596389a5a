"""The base of all messages, and the types of their fields."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt

from dlctl.util.record import Record, record

Array = npt.NDArray[Any]
Json = dict[str, Any]
"""Plain data: None, bool, int, float, str, lists and dicts of them, a few levels deep."""


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The least and the largest value that a number on the wire may have. `decode` refuses others
    before a role sees them, so no sum of received numbers can outgrow what persists it.
    """

    least: float
    most: float
    allows_nan: bool = False

    def allow(self, value: float) -> bool:
        return self.least <= value <= self.most or (self.allows_nan and value != value)


NATURAL_MAX = 2**53 - 1
"""No run counts further. Exact as a float64, too, and in every reader of JSON."""
NATURAL = NumberRange(0, NATURAL_MAX)
"""The range of a plain int field: a count, an index or a number."""
FINITE = NumberRange(-sys.float_info.max, sys.float_info.max)
"""The range of a plain float field: no NaN, no infinity."""
Signed = Annotated[int, NumberRange(-NATURAL_MAX, NATURAL_MAX)]
Samples = Annotated[int, NumberRange(0, 2**31 - 1)]
"""The number of samples in a single push."""
Weight = Annotated[float, NumberRange(0.0, 2.0**100)]
"""Sums of weights stay finite."""
Sum = Annotated[float, NumberRange(-float("inf"), float("inf"), allows_nan=True)]
"""A sum of what may have diverged."""


class Message(Record):
    """Base of all messages. Its repr shows arrays as dtype and length, never their content, and
    no secrets.
    """

    __slots__ = ()
    code: ClassVar[int]
    borrows: ClassVar[bool] = False
    """Whether its arrays belong to the creator and will change: the transport copies them."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{f.name}={_short(f.name, getattr(self, f.name))}" for f in fields(self))
        return f"{type(self).__name__}({shown})"


_SECRET = ("secret", "token")


def _short(name: str, value: object) -> str:
    if name in _SECRET and value:
        return "..."
    if isinstance(value, np.ndarray):
        return f"{value.dtype}[{value.size}]"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@record
class Packed(Message):
    """A compressed vector of `length` elements; `kind` names the compressor that expands it."""

    kind: str
    length: int
    arrays: tuple[Array, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)
