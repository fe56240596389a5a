"""The 64 largest of every chunk of 4,096 elements, in 2 bits each: SparseLoCo's pushes.

Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025. Top-k by chunks
needs no search through a whole vector, and sends something of every part of the model: a layer with
small entries sends as many as one with large ones. The k chosen entries u of a chunk become

    shift = mean(u),   scale = 6 sigma(u) / 4,   q = clamp(round((u - shift) / scale) + 2, 0, 3)

and expand to lookup[q], the mean of all entries with the same q. The quantisation errors and all
other entries stay in the residual. With float32 lookups, and positions packed by `indices.py`, an
entry takes about 12 bits: with 1.56 % of them a push is a 170th of a dense one.

- Up to four entries of a chunk need no quantiser: each has its own level.
- A chunk is 4,096 elements of a server's slice; in the authors' code it is 64 x 64 of a matrix.
- The last chunk of a slice is shorter, and sends the same fraction of it, rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Le

from dlctl.compress import indices
from dlctl.compress.base import Compressor, Delta
from dlctl.compress.plain import (
    DENSE_BELOW,
    Least,
    check_array,
    expand_plain,
    is_plain,
    take_chosen,
    take_plain,
)
from dlctl.compress.values import Precision, arrays_of
from dlctl.errors import RemoteProtocolError
from dlctl.job.config import STRICT
from dlctl.model.vector import Vector, host_view, indices_like, largest, to_host
from dlctl.wire.messages import Array, Packed

LEVELS = 4
SIGMAS = 6
"""Width of all levels together."""
CHUNK_MAX = 2**20
OUTLINE = np.dtype("<u4")
"""The dtype of two numbers that are sent as bytes: elements of a chunk, and total entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedTopKOptions:
    __pydantic_config__ = STRICT

    chunk: Annotated[int, Ge(2), Le(CHUNK_MAX)] = 4096
    """Elements of which the largest ones are sent."""
    keep: Annotated[int, Ge(1), Le(CHUNK_MAX)] = 64
    """Number of elements sent of each chunk; 64 of 4096 are 1.56 %."""
    values: Literal["2bit"] | Precision = "2bit"
    """Precision of the sent values. Rounding errors go into a later push."""
    dense_below: Least = DENSE_BELOW
    """A server's slice with fewer elements than this is sent uncompressed."""


class ChunkedTopK(Compressor):
    """Arrays on the wire: q as uint8[ceil(n/4)], lowest bits first; lookups float32[4 c] for the c
    chunks of the slice; positions as `indices.py` packs them; the chunk's elements and n, as bytes.
    Or a plain form (`plain.py`).
    """

    Options: ClassVar[type[Any]] = ChunkedTopKOptions
    selects = True

    def __init__(self, options: ChunkedTopKOptions) -> None:
        self.chunk = options.chunk
        self.keep = min(options.keep, options.chunk)
        self.values = options.values
        self.dense_below = options.dense_below

    def take(self, u: Vector, shard: int = 0) -> Packed:
        """Take the largest elements of each chunk, in their quantised precision."""
        plain = take_plain("topk-chunked", u, self.dense_below)
        if plain is not None:
            return plain
        here = host_view(u)
        where = self._largest(here)
        if self.values != "2bit":
            return take_chosen("topk-chunked", u, where, self.values)
        picked, positions = to_host(here[where]), to_host(where)
        sent = picked != 0
        picked, positions = picked[sent], positions[sent]
        codes, lookup = _quantised(picked, positions // self.chunk, -(-len(u) // self.chunk))
        values = _looked_up(codes, lookup, positions // self.chunk)
        here[indices_like(here, positions)] = _like(here, picked - values.astype(picked.dtype))
        outline = np.array([self.chunk, positions.size], OUTLINE).view(np.uint8)
        packed = indices.pack(positions, len(u))
        return Packed("topk-chunked", len(u), (_pack(codes), lookup, packed, outline))

    def _largest(self, u: Vector) -> Vector:
        """Ascending indices (int64, where `u` is)."""
        whole = len(u) // self.chunk * self.chunk
        rows = u[:whole].reshape(-1, self.chunk)
        found = largest_of_rows(rows, self.keep)
        if whole == len(u):
            return found
        rest = u[whole:]
        more = largest(rest, -(-self.keep * len(rest) // self.chunk)) + whole
        if isinstance(u, np.ndarray):
            return np.concatenate([found, more])
        joined = found.new_empty(len(found) + len(more))
        joined[: len(found)], joined[len(found) :] = found, more
        return joined

    @staticmethod
    def expand(packed: Packed, size: int) -> Delta:
        """A sparse delta, or a dense one of a small shard."""
        if is_plain(packed):
            return expand_plain(packed, size)
        codes, lookup, positions, outline = arrays_of(packed, size, 4)
        check_array(outline, "u1", 2 * OUTLINE.itemsize, "bytes of an outline")
        chunk, count = map(int, outline.view(OUTLINE))
        if not 0 < chunk <= CHUNK_MAX:
            raise RemoteProtocolError(f"chunks of {chunk} elements")
        check_array(codes, "u1", -(-count // 4), "bytes of 2-bit values")
        check_array(lookup, "<f4", LEVELS * -(-size // chunk), "levels")
        found = indices.unpack(positions, count, size)
        return Delta(_looked_up(_unpack(codes, count), lookup, found // chunk), found)


def largest_of_rows(rows: Vector, keep: int) -> Vector:
    """The positions of the `keep` largest of each row, ascending, in the concatenated rows."""
    width = rows.shape[1]
    if isinstance(rows, np.ndarray):
        order = np.abs(rows).view(f"i{rows.itemsize}")
        columns = np.sort(np.argpartition(order, width - keep, axis=1)[:, width - keep :], axis=1)
        return (columns + width * np.arange(len(rows))[:, None]).reshape(-1)
    columns = rows.abs().topk(keep, dim=1, sorted=False).indices.sort(dim=1).values
    first = columns.new_tensor(np.arange(len(rows)) * width)
    return (columns + first[:, None]).reshape(-1)


def _quantised(values: Array, chunks: Array, count: int) -> tuple[Array, Array]:
    """(q as uint8[n], lookups float32[4 * count]) of values, each of a chunk; ascending."""
    numbers = np.bincount(chunks, minlength=count)
    shift = _sums(chunks, values, count) / np.maximum(numbers, 1)
    centred = values - shift[chunks]
    variance = _sums(chunks, centred**2, count) / np.maximum(numbers - 1, 1)
    scale = SIGMAS / LEVELS * np.sqrt(variance)
    scale[~(scale > 0)] = 1.0
    codes = np.clip(np.rint(centred / scale[chunks]) + LEVELS // 2, 0, LEVELS - 1).astype(np.int64)
    rank = np.arange(values.size) - (np.cumsum(numbers) - numbers)[chunks]
    codes = np.where(numbers[chunks] <= LEVELS, rank, codes)
    level = LEVELS * chunks + codes
    of_level = np.maximum(np.bincount(level, minlength=LEVELS * count), 1)
    lookup = _sums(level, centred, LEVELS * count) / of_level + np.repeat(shift, LEVELS)
    lookup[np.bincount(level, minlength=LEVELS * count) == 0] = 0.0
    return codes.astype(np.uint8), lookup.astype("<f4")


def _sums(groups: Array, values: Array, count: int) -> Array:
    """float64[count]: the sum of the values of each group."""
    return np.bincount(groups, weights=values, minlength=count)


def _looked_up(codes: Array, lookup: Array, chunks: Array) -> Array:
    """float32[n]: the values that the codes stand for in the tables of their chunks."""
    found: Array = lookup[LEVELS * chunks + codes]
    return found


def _like(u: Vector, values: Array) -> Vector:
    return values if isinstance(u, np.ndarray) else u.new_tensor(values)


def _pack(codes: Array) -> Array:
    """uint8[ceil(n/4)]: codes of two bits, four in a byte."""
    padded = np.zeros(-(-codes.size // 4) * 4, np.uint8)
    padded[: codes.size] = codes
    fours = padded.reshape(-1, 4)
    packed: Array = fours[:, 0] | fours[:, 1] << 2 | fours[:, 2] << 4 | fours[:, 3] << 6
    return packed


def _unpack(packed: Array, count: int) -> Array:
    """uint8[count]: the codes of two bits in packed bytes."""
    fours = packed[:, None] >> np.array([0, 2, 4, 6], np.uint8) & np.uint8(3)
    return fours.reshape(-1)[:count]
