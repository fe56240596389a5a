"""What a compressor is, and what comes out when its work is undone.

A compressor *takes* what it sends out of a vector and leaves the rest: after `take(u)`, `u` is the
residual. Error feedback is then nothing but adding the next gradients to the same vector, and

    sum of everything taken + residual == sum of everything added

because what was rounded off on the way out stays in the residual, too, to the last bit. There are
two exceptions. What `onebit`, `powersgd`, `dct` and stochastic `int8` send has so many bits that
what they leave is rounded to the precision of `u`, once per push. And `randomk` with `unbiased` is
without error feedback: it throws away what it does not send, and its pushes are right on average
only.

Vectors are numpy arrays or torch tensors alike (`dlctl/vector.py`), so that a gradient on a GPU is
compressed there and only what is sent comes to the host.

One compressor serves a worker for as long as that lives, and takes from one slice per server in
turn. What it keeps from push to push (a threshold, a factor) it keeps per `shard`.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from dlctl.messages import Array, Packed
from dlctl.settings import Setting, fraction
from dlctl.vector import Spread, Vector, copy_of

DENSITY = Setting(help="part of the entries that a push carries, 0 < d <= 1", parse=fraction)
"""The live setting of compressors that send only some entries, in their attribute `density`."""


class Delta(NamedTuple):
    """An update of one shard: all elements, or `values[i]` at `indices[i]`."""

    values: Array
    """float32[n]; n is the shard's size if dense."""
    indices: Array | None = None
    """int64[n], strictly increasing, within the shard; None: dense."""
    positions: Array | None = None
    """The indices as `compress/indices.py` packs them, if that is how they came."""


class Compressor(Protocol):
    """`Options` is a frozen dataclass of this compressor's keys in the job file.

    One that has settings which may change while a run goes on declares them in an attribute `live`,
    key -> `Setting`.
    """

    Options: ClassVar[type[Any]]

    def __init__(self, options: Any) -> None: ...

    def reseed(self, *numbers: int) -> None:
        """From now on roll the dice that these numbers stand for; without dice, do nothing.

        Called before a worker's first push with the job's seed and the worker's slot and epoch, so
        that no two workers roll the same.
        """
        ...

    def take(self, u: Vector, shard: int = 0) -> Packed:
        """Pack part of `u` (float32 or float64 [n]) and leave in `u` what was not sent.

        shard: the server that owns this slice. The arrays of the result share no memory with `u`.
        """
        ...

    @staticmethod
    def expand(packed: Packed, size: int) -> Delta:
        """Undo `take` for a shard of `size` elements. Values may still be non-finite.

        Raises RemoteProtocolError unless every array has the dtype, length and range that it must.
        """
        ...


def take(compressor: Compressor, u: Vector, shard: int) -> Packed:
    """Have a compressor take from `u`; from that of a cut replica each process takes its part."""
    if isinstance(u, Spread) and not len(u):
        u = np.asarray(u)  # No process has any part of nothing.
    if not isinstance(u, Spread):
        return compressor.take(u, shard)
    if getattr(compressor, "takes_all", False):
        whole = copy_of(u)
        u[:] = 0
        return Packed("none", len(u), (whole,))
    keys = getattr(compressor, "live", {})
    return u.packed(shard, {key: getattr(compressor, key) for key in keys})


def dice(numbers: tuple[int, ...]) -> np.random.Generator:
    """A generator whose numbers all follow from these natural numbers, for `reseed`."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(numbers)))
