"""The base of all messages, and the types of their fields."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt

from dlctl.util.record import Record, record

Array = npt.NDArray[Any]
Json = dict[str, Any]
"""Plain data: None, bool, int, float, str, lists and dicts of them, a few levels deep."""
Signed = Annotated[int, "may be negative"]
"""A plain int on the wire is a count, an index or a number: never negative."""


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
