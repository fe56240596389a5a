"""What a worker has of one shard, as the shard sent it: the base that changes can be put on.

A method may change its copy of the parameters between two fetches, all of it (Downpour's local
steps). A whole slice overwrites that; changes alone would leave it where the shard has changed
nothing. So of such a method the values are kept as they came, and a fetch sets the whole model to
them again: it is the same to the last bit, whichever answer has come. A method that leaves the
model alone needs no copy, the model is what came.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlctl.compress import indices
from dlctl.compress.values import WIRE_DTYPES, as_float32
from dlctl.errors import RemoteProtocolError
from dlctl.messages import Array, Parameters, SparseParameters
from dlctl.vector import Vector, copy_into, copy_of, put_into


@dataclass(frozen=True, slots=True)
class Slice:
    """An answer to a fetch, checked."""

    generation: int
    version: int
    values: Array
    """float32[n]"""
    where: Array | None = None
    """int64[n]: the elements that `values` are of; None: all of them."""
    since: int = 0
    """The version that the others are of, if not all are here."""
    remembered: bool = False
    """Whether the shard will know what has changed since this version."""


def slice_in(message: Parameters | SparseParameters, size: int) -> Slice:
    """Values of 16 bits become float32: their type says how. A server decides which they are.

    Raises RemoteProtocolError unless it fits a shard of `size` elements.
    """
    values = message.values
    count = values.size if isinstance(message, SparseParameters) else size
    if values.dtype not in WIRE_DTYPES or values.size != count:
        raise RemoteProtocolError(f"{values.size} parameters ({values.dtype}) of {size}")
    of = (message.generation, message.version)
    if isinstance(message, Parameters):
        return Slice(*of, as_float32(values), remembered=message.remembered)
    where = _positions_in(message, size)
    return Slice(*of, as_float32(values), where, message.since, remembered=True)


def _positions_in(message: SparseParameters, size: int) -> Array:
    """int64[n], each within the shard. The sums are checked before anything is allocated."""
    counts, lengths, packed = message.counts, message.lengths, message.positions
    if sum(counts) != message.values.size:
        raise RemoteProtocolError(f"{message.values.size} values in {sum(counts)} places")
    if len(lengths) != len(counts) or sum(lengths) != packed.size:
        raise RemoteProtocolError(
            f"{packed.size} bytes of positions in {len(counts)} parts, but lengths of "
            f"{len(lengths)} parts and {sum(lengths)} bytes"
        )
    parts, at = [np.empty(0, np.int64)], 0
    for count, length in zip(counts, lengths, strict=True):
        parts.append(indices.unpack(packed[at : at + length], count, size))
        at += length
    return np.concatenate(parts) if len(parts) > 2 else parts[-1]


def answer_bytes(message: Parameters | SparseParameters) -> int:
    if isinstance(message, Parameters):
        return message.values.nbytes
    return message.values.nbytes + message.positions.nbytes


class Basis:
    def __init__(self) -> None:
        self.version = 0
        """Of the slice that was put into the model last."""
        self.generation = 0
        """Whose version that is; 0: what came is not at hand any more, or nothing has come."""
        self._values: Vector | None = None
        """As they came; None: they stand in the model, or nowhere."""

    def will_change(self) -> None:
        """From now on the method may change the model: what came is at hand only as a copy."""
        if self._values is None:
            self.generation = 0

    def forget(self) -> None:
        """What stands in the model is of no one version: the next fetch brings all of it."""
        self._values, self.generation = None, 0

    def fits(self, arrived: Slice) -> bool:
        """Whether a slice can be put into the model: all of it, or on top of what came last."""
        base = (arrived.generation, arrived.since)
        return arrived.where is None or base == (self.generation, self.version)

    def place(self, arrived: Slice, model: Vector, *, keep: bool) -> None:
        """Make this slice of the model what the shard's is at the version that has arrived.

        keep: the method changes the model, so that the next changes need a copy to be put on.
        """
        assert self.fits(arrived)
        if arrived.where is None:
            copy_into(model, arrived.values)
            self._keep(model if keep and arrived.remembered else None)
        elif self._values is None:
            put_into(model, arrived.where, arrived.values)
        else:
            put_into(self._values, arrived.where, arrived.values)
            model[:] = self._values
            self._keep(self._values if keep else None)
        self.version = arrived.version
        self.generation = arrived.generation if self._values is not None or not keep else 0

    def _keep(self, values: Vector | None) -> None:
        if values is None or self._values is None:
            self._values = None if values is None else copy_of(values)
        elif values is not self._values:
            self._values[:] = values
