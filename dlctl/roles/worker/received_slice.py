"""A shard's slice as the worker received it: the base to which changes are applied.

A method may change its whole copy of the parameters between two fetches (Downpour's local steps). A
whole slice overwrites that; changes alone would not where the shard is unchanged. So for such a
method the received values are stored, and a fetch resets the whole model to them: the result is
identical bit for bit, whichever answer arrived. A method that does not change the model needs no
copy, since the model is what was received.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlctl.compress import indices
from dlctl.compress.values import WIRE_DTYPES, as_float32
from dlctl.errors import RemoteProtocolError
from dlctl.model.vector import Vector, copy_into, copy_of, put_into
from dlctl.wire.messages import Array, Parameters, SparseParameters


@dataclass(frozen=True, slots=True)
class Slice:
    """An answer to a fetch, checked."""

    term: int
    version: int
    values: Array
    """float32[n]"""
    where: Array | None = None
    """int64[n]: the positions of `values`; None: all of them."""
    since: int = 0
    """The base version of changes."""
    remembered: bool = False
    """Whether the shard will know the changes since this version."""


def slice_in(message: Parameters | SparseParameters, size: int) -> Slice:
    """Convert an answer; 16-bit values, whose type the server decides, become float32.

    Raises RemoteProtocolError unless it fits a shard of `size` elements.
    """
    values = message.values
    count = values.size if isinstance(message, SparseParameters) else size
    if values.dtype not in WIRE_DTYPES or values.size != count:
        raise RemoteProtocolError(f"{values.size} parameters ({values.dtype}) of {size}")
    of = (message.term, message.version)
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
        """The version of the slice placed in the model last."""
        self.term = 0
        """The term of its server; 0: no received values are available."""
        self._values: Vector | None = None
        """A copy of the received values; None: they are in the model, or not available."""

    def will_change(self) -> None:
        """The method may change the model from now on: only a copy is a valid base."""
        if self._values is None:
            self.term = 0

    def forget(self) -> None:
        """The model is not of a single version: the next fetch requests the whole slice."""
        self._values, self.term = None, 0

    def fits(self, arrived: Slice) -> bool:
        """Whether a slice can be placed in the model: a whole one, or changes of the base."""
        base = (arrived.term, arrived.since)
        return arrived.where is None or base == (self.term, self.version)

    def place(self, arrived: Slice, model: Vector, *, keep: bool) -> None:
        """Set this slice of the model to the version that has arrived.

        keep: the method changes the model, so the next changes need a copy as their base.
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
        self.term = arrived.term if self._values is not None or not keep else 0

    def _keep(self, values: Vector | None) -> None:
        if values is None or self._values is None:
            self._values = None if values is None else copy_of(values)
        elif values is not self._values:
            self._values[:] = values
