"""The interface of compressors, and the result of expanding a push.

A compressor *takes* the sent values out of a vector and leaves the rest: after `take(u)`, `u` is
the residual. Error feedback then only means adding the next gradients to the same vector, and

    sum of everything taken + residual == sum of everything added

because rounding errors also stay in the residual, exactly. There are two exceptions. The values
sent by `onebit`, `powersgd`, `dct` and stochastic `int8` have so many bits that the residual is
rounded to the precision of `u`, once per push. And `randomk` with `unbiased` has no error feedback:
it discards the values that it does not send, and its pushes are correct only on average.

Vectors are numpy arrays or torch tensors alike (`dlctl/vector.py`), so that a gradient on a GPU is
compressed there and only the sent values are copied to the host.

One compressor serves a worker for its whole life, and takes from one slice per server in turn. Its
state between pushes (a threshold, a factor) is separate for each `shard`.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from dlctl.messages import Array, Packed
from dlctl.settings import Setting, fraction
from dlctl.vector import Spread, Vector, copy_of

DENSITY = Setting(help="fraction of the entries in a push, 0 < d <= 1", parse=fraction)
"""The live setting of compressors that send only some entries, in their attribute `density`."""


class Delta(NamedTuple):
    """An update of one shard: all elements, or `values[i]` at `indices[i]`."""

    values: Array
    """float32[n]; n is the shard's size if dense."""
    indices: Array | None = None
    """int64[n], strictly increasing, within the shard; None: dense."""
    positions: Array | None = None
    """The indices as packed by `compress/indices.py`, if they were received like that."""


class Compressor(Protocol):
    """`Options` is a frozen dataclass of this compressor's keys in the job file.

    Settings that may change during a run are declared in an attribute `live`, key -> `Setting`.
    """

    Options: ClassVar[type[Any]]

    def __init__(self, options: Any) -> None: ...

    def reseed(self, *numbers: int) -> None:
        """Seed the random generator with these numbers; without one, do nothing.

        Called before a worker's first push with the job's seed and the worker's slot and epoch, so
        that no two workers draw the same numbers.
        """
        ...

    def take(self, u: Vector, shard: int = 0) -> Packed:
        """Pack part of `u` (float32 or float64 [n]) and leave the residual in `u`.

        shard: the server that owns this slice. The arrays of the result share no memory with `u`.
        """
        ...

    @staticmethod
    def expand(packed: Packed, size: int) -> Delta:
        """Undo `take` for a shard of `size` elements. Values may still be non-finite.

        Raises RemoteProtocolError unless every array has a valid dtype, length and range.
        """
        ...


def take(compressor: Compressor, u: Vector, shard: int) -> Packed:
    """Have a compressor take from `u`; for a split replica each process takes its part."""
    if isinstance(u, Spread) and not len(u):
        u = np.asarray(u)  # No process has a part of an empty vector.
    if not isinstance(u, Spread):
        return compressor.take(u, shard)
    if getattr(compressor, "takes_all", False):
        whole = copy_of(u)
        u[:] = 0
        return Packed("none", len(u), (whole,))
    keys = getattr(compressor, "live", {})
    return u.packed(shard, {key: getattr(compressor, key) for key in keys})


def dice(numbers: tuple[int, ...]) -> np.random.Generator:
    """A random generator seeded by these natural numbers, for `reseed`."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(numbers)))
