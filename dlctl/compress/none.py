"""No selection: every element is sent in every push, as float32 or rounded to 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dlctl.compress.base import Compressor, Delta
from dlctl.compress.plain import expand_whole
from dlctl.compress.values import Precision, take_values
from dlctl.job.config import STRICT
from dlctl.model.vector import Vector
from dlctl.wire.messages import Packed


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseOptions:
    __pydantic_config__ = STRICT

    values: Precision = "float32"
    """Precision of the sent values. "float16" and "bfloat16" halve the bytes; rounding errors go
    into the next push. "bfloat16" has the range of float32 and 8 significant bits; "float16" has 11
    of them, and its range ends at 65504."""


class Dense(Compressor):
    """Arrays on the wire: values [n] (`values.py`).

    A NaN or an infinity in `u` is sent unchanged and leaves 0; workers check for them before.
    """

    Options: ClassVar[type[Any]] = DenseOptions

    def __init__(self, options: DenseOptions) -> None:
        self.precision = options.values

    @property
    def takes_all(self) -> bool:
        """Whether a float32 vector leaves no residual, so that it may be given away."""
        return self.precision == "float32"

    def take(self, u: Vector, shard: int = 0) -> Packed:
        """Take all of `u`; only rounding errors stay (float32 of float32: 0)."""
        return Packed("none", len(u), (take_values(u, self.precision),))

    @staticmethod
    def expand(packed: Packed, size: int) -> Delta:
        """A dense delta; float32 values are the array of `packed` itself, perhaps read-only."""
        return expand_whole(packed, size)
