"""Every element travels in every push, in 16 bits: half the bytes for no choice at all.

`fp16` is IEEE 754's binary16, 11 significant bits up to 65504; `bf16` is the upper half of a
float32, its whole range with 8 significant bits. What the rounding takes away, to the last bit,
stays with the worker and goes into its next push: the error feedback of Seide et al., "1-Bit
Stochastic Gradient Descent", Interspeech 2014, for a quantiser that hardly needs it.

On the wire they are what `none` makes with `values`, under names of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dlctl.compress.base import Compressor, Delta
from dlctl.compress.plain import check_array
from dlctl.compress.values import Precision, arrays_of, as_float32, take_values
from dlctl.job.config import STRICT
from dlctl.model.vector import Vector
from dlctl.wire.messages import Packed


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfOptions:
    """The options of the 16-bit compressors: there are none."""

    __pydantic_config__ = STRICT


class Float16(Compressor):
    """Arrays on the wire: values float16[n].

    Values above 65504 saturate, and the rest waits. A NaN or an infinity in `u` is sent unchanged
    and leaves 0; workers check for them before.
    """

    KIND: ClassVar[str] = "fp16"
    PRECISION: ClassVar[Precision] = "float16"
    WIRE_DTYPE: ClassVar[str] = "<f2"
    Options: ClassVar[type[Any]] = HalfOptions

    def __init__(self, options: HalfOptions) -> None:
        """options: empty, as the compressor has none."""

    def take(self, u: Vector, shard: int = 0) -> Packed:
        """Take all of `u`; rounding errors stay."""
        return Packed(self.KIND, len(u), (take_values(u, self.PRECISION),))

    @classmethod
    def expand(cls, packed: Packed, size: int) -> Delta:
        """A dense delta. Raises RemoteProtocolError for values of any other dtype or number."""
        (values,) = arrays_of(packed, size, 1)
        check_array(values, cls.WIRE_DTYPE, size, "values")
        return Delta(as_float32(values))


class BFloat16(Float16):
    """Arrays on the wire: values uint16[n], the upper halves of float32 (`bfloat16.py`)."""

    KIND: ClassVar[str] = "bf16"
    PRECISION: ClassVar[Precision] = "bfloat16"
    WIRE_DTYPE: ClassVar[str] = "<u2"
