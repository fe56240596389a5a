"""The interface of compressors, and the result of expanding a push.

A compressor *takes* the sent values out of a vector and leaves the rest: after `take(u)`, `u` is
the residual. Error feedback then only means adding the next gradients to the same vector, and

    sum of everything taken + residual == sum of everything added

because rounding errors also stay in the residual, exactly. There are two exceptions. The values
sent by `onebit`, `powersgd`, `dct` and stochastic `int8` have so many bits that the residual is
rounded to the precision of `u`, once per push. And `randomk` with `unbiased` and `topk` with
`feedback = false` have no error feedback: they discard the values that they do not send. The pushes
of `randomk` are correct on average then.

Vectors are numpy arrays or torch tensors alike (`dlctl/model/vector.py`), so that a gradient on a
GPU is compressed there and only the sent values are copied to the host.

One compressor serves a worker for its whole life, and takes from one slice per server in turn. Its
state between pushes (a threshold, a factor) is separate for each `shard`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from dlctl import outdated
from dlctl.job.settings import Setting, of_options
from dlctl.model.vector import Spread, Vector, copy_of
from dlctl.wire.messages import Array, Packed


class Delta(NamedTuple):
    """An update of one shard: all elements, or `values[i]` at `indices[i]`."""

    values: Array
    """float32[n]; n is the shard's size if dense."""
    indices: Array | None = None
    """int64[n], strictly increasing, within the shard; None: dense."""
    positions: Array | None = None
    """The indices as packed by `compress/indices.py`, if they were received like that."""

    def dense(self, size: int) -> Array:
        """As a full vector, float32[size]; the array itself if it is dense already."""
        if self.indices is None:
            return self.values
        full = np.zeros(size, np.float32)
        full[self.indices] = self.values
        return full


class Compressor(ABC):
    """`Options` is a frozen dataclass of this compressor's keys in the job file.

    One of a type `Live[...]` may change during a run: it is an attribute of the compressor then.
    """

    Options: ClassVar[type[Any]]
    live: ClassVar[Mapping[str, Setting]] = MappingProxyType({})
    """The options that are live, and how users write them."""
    selects: ClassVar[bool] = False
    """Whether a push may hold only some elements."""
    density: float = 1.0
    """The largest fraction of the elements in a push."""

    def __init_subclass__(cls) -> None:
        cls.live = of_options(cls.Options)

    def __init__(self, options: Any) -> None:  # noqa: B027  some have no options
        """options: an instance of `Options`."""

    @property
    def takes_all(self) -> bool:
        """Whether a float32 vector leaves no residual, so that it may be given away."""
        return False

    def reseed(self, *numbers: int) -> None:  # noqa: B027  most are deterministic
        """Seed the random generator with these numbers.

        Called before a worker's first push with the job's seed and the worker's slot and term, so
        that no two workers draw the same numbers.
        """

    @abstractmethod
    def take(self, u: Vector, shard: int = 0) -> Packed:
        """Pack part of `u` (float32 or float64 [n]) and leave the residual in `u`.

        shard: the server that owns this slice. The arrays of the result share no memory with `u`.
        """

    @staticmethod
    @abstractmethod
    def expand(packed: Packed, size: int) -> Delta:
        """Undo `take` for a shard of `size` elements. Values may still be non-finite.

        Raises RemoteProtocolError unless every array has a valid dtype, length and range.
        """


def take(compressor: Compressor, u: Vector, shard: int) -> Packed:
    """Have a compressor take from `u`; for a split replica each process takes its part."""
    if isinstance(u, Spread) and not len(u):
        u = np.asarray(u)  # No process has a part of an empty vector.
    if not isinstance(u, Spread):
        return compressor.take(u, shard)
    if compressor.takes_all:
        whole = copy_of(u)
        u[:] = 0
        return Packed("none", len(u), (whole,))
    return u.packed(shard, {key: getattr(compressor, key) for key in compressor.live})


def rng_of(numbers: tuple[int, ...]) -> np.random.Generator:
    """A random generator seeded by these natural numbers, for `reseed`."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(numbers)))


if not TYPE_CHECKING:
    __getattr__ = outdated.names_of(__name__)
