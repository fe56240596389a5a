"""An update rule, written once, for dense and for sparse pushes.

A rule sees blocks of at most `BLOCK` elements: short enough that the temporaries of its several
passes stay in the processor's cache, so that memory is read and written about once per update.
Of a dense push a block is a view. Of a sparse push it is a copy of the touched elements, written
back afterwards; indices are unique, so none of them is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from dlctl.compress.base import Delta
from dlctl.messages import Array

BLOCK = 64 * 1024

Block = tuple[Array, Array, tuple[Array, ...]]
"""The shard's elements, their gradient (not to be written), and their elements of each slot."""


def check_length(delta: Delta, size: int) -> None:
    """Whether a delta is for a shard of `size` elements: it would be broadcast otherwise."""
    count = delta.values.size
    wanted, of = (size, "elements")
    if delta.indices is not None:
        wanted, of = delta.indices.size, "indices"
    assert count == wanted, f"{count} values for {wanted} {of}"


def blocks(w: Array, delta: Delta, slots: Mapping[str, Array]) -> Iterator[Block]:
    """Everything that `delta` touches, block by block; what is changed in a block is kept."""
    check_length(delta, w.size)
    count = delta.values.size
    if delta.indices is None:
        for lo in range(0, count, BLOCK):
            cut = slice(lo, lo + BLOCK)
            yield w[cut], delta.values[cut], tuple(slot[cut] for slot in slots.values())
        return
    for lo in range(0, count, BLOCK):
        where = delta.indices[lo : lo + BLOCK]
        touched = [array[where] for array in (w, *slots.values())]
        yield touched[0], delta.values[lo : lo + BLOCK], tuple(touched[1:])
        for array, part in zip((w, *slots.values()), touched, strict=True):
            array[where] = part


def scratch() -> Array:
    """A float32 block for a rule's temporaries."""
    return np.empty(BLOCK, np.float32)
