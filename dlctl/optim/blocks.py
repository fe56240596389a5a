"""An update rule, written once, for dense and for sparse pushes.

A rule sees blocks of at most `BLOCK` elements: short enough that the temporaries of its several
passes stay in the processor's cache, so that memory is read and written about once per update.
It reads the present values and writes the next ones: in place, or elsewhere where the present ones
have to outlive the update. Of a dense push a block is a view. Of a sparse push it is a copy of the
touched elements, written back afterwards; indices are unique, so none of them is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from dlctl.compress.base import Delta
from dlctl.messages import Array
from dlctl.vector import chosen

BLOCK = 64 * 1024


class Block(NamedTuple):
    """Some elements of a shard; all arrays are float32 and of one length."""

    w: Array
    g: Array
    """Their gradient; not to be written."""
    slots: tuple[Array, ...]
    w_next: Array
    """Where the next values go: `w` itself, or memory that overlaps with nothing here."""
    slots_next: tuple[Array, ...]

    @staticmethod
    def in_place(w: Array, g: Array, slots: tuple[Array, ...]) -> Block:
        return Block(w, g, slots, w, slots)


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
            yield Block.in_place(
                w[cut], delta.values[cut], tuple(slot[cut] for slot in slots.values())
            )
        return
    for lo in range(0, count, BLOCK):
        where = delta.indices[lo : lo + BLOCK]
        touched = [chosen(array, where) for array in (w, *slots.values())]
        yield Block.in_place(touched[0], delta.values[lo : lo + BLOCK], tuple(touched[1:]))
        for array, part in zip((w, *slots.values()), touched, strict=True):
            array[where] = part


def scratch() -> Array:
    """A float32 block for a rule's temporaries."""
    return np.empty(BLOCK, np.float32)
