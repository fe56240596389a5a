"""An update rule, written once, for dense and for sparse pushes.

A rule sees blocks of at most `BLOCK` elements: short enough that the temporaries of its several
passes stay in the processor's cache, so that memory is read and written about once per update.
It reads the current values and writes the next ones: in place, or elsewhere if the current ones
have to outlive the update. For a dense push a block is a view. For a sparse push it is a copy of
the pushed elements, written back afterwards; indices are unique, so none of them is lost. Several
threads share the blocks of a large push.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from dlctl import kernels
from dlctl.compress.base import Delta
from dlctl.model.vector import chosen
from dlctl.util import threads
from dlctl.util.threads import BLOCK, PLACES
from dlctl.wire.messages import Array


class KeptArrays(NamedTuple):
    """What the optimiser keeps beside the matrices of a shard, by name."""

    now: Mapping[str, Array]
    following: Mapping[str, Array]
    """Output for what changes of it; it has the present values."""


class BlockPlace(NamedTuple):
    """The elements of a shard in a block."""

    at: int
    """The position of the first element in the push."""
    indices: Array | None = None
    """The positions in the shard, strictly increasing; None: from `at` on."""
    kept: KeptArrays | None = None
    """For an optimiser of matrices (`matrices.py`); the block is all of the shard then."""


class Block(NamedTuple):
    """Some elements of a shard; all arrays are float32 and of one length."""

    place: BlockPlace
    w: Array
    g: Array
    """The gradient of these elements; read-only."""
    slots: tuple[Array, ...]
    w_next: Array
    """Output for the next values: `w` itself, or memory that does not overlap."""
    slots_next: tuple[Array, ...]

    @property
    def at(self) -> int:
        return self.place.at

    @staticmethod
    def in_place(place: BlockPlace, w: Array, g: Array, slots: tuple[Array, ...]) -> Block:
        return Block(place, w, g, slots, w, slots)

    def part(self, lo: int, hi: int) -> Block:
        """The elements [lo, hi) of this block, as a block."""
        at, indices, _ = self.place
        place = BlockPlace(at + lo, None if indices is None else indices[lo:hi])
        slots = tuple(slot[lo:hi] for slot in self.slots)
        slots_next = tuple(slot[lo:hi] for slot in self.slots_next)
        w, g, w_next = (array[lo:hi] for array in (self.w, self.g, self.w_next))
        return Block(place, w, g, slots, w_next, slots_next)


Rule = Callable[[Iterable[Block]], None]
"""Processes blocks of one update, and writes the next values of each; called with all of them, or
in several threads, each with some.
"""
Cut = Callable[[int, int], Iterator[Block]]
"""The blocks of those elements of a push that are in [lo, hi)."""


def check_length(delta: Delta, size: int) -> None:
    """Checks that a delta is for a shard of `size` elements: it would be broadcast otherwise."""
    count = delta.values.size
    wanted, of = (size, "elements")
    if delta.indices is not None:
        wanted, of = delta.indices.size, "indices"
    assert count == wanted, f"{count} values for {wanted} {of}"


def go_over(delta: Delta, cut: Cut, rule: Rule) -> None:
    """Apply the rule to all blocks of a push; several threads share a large one."""
    # A few scattered elements take as long as many contiguous ones. Either way a part begins at a
    # block boundary, so that no two threads share a block.
    part = threads.PART if delta.indices is None else BLOCK
    threads.in_parts(delta.values.size, lambda lo, hi: rule(cut(lo, hi)), part)


def update_in_place(w: Array, delta: Delta, slots: Mapping[str, Array], rule: Rule) -> None:
    """The elements of `delta`, block by block; changes of a block are written back."""
    arrays = (w, *slots.values())
    where = delta.indices

    def dense(lo: int, hi: int) -> Iterator[Block]:
        for at in range(lo, hi, BLOCK):
            cut = slice(at, min(at + BLOCK, hi))
            w, *slots = (array[cut] for array in arrays)
            yield Block.in_place(BlockPlace(at), w, delta.values[cut], tuple(slots))

    def sparse(lo: int, hi: int) -> Iterator[Block]:
        assert where is not None
        for at in range(lo, hi, PLACES):
            cut = slice(at, min(at + PLACES, hi))
            touched = [chosen(array, where[cut]) for array in arrays]
            place = BlockPlace(at, where[cut])
            yield Block.in_place(place, touched[0], delta.values[cut], tuple(touched[1:]))
            for array, part in zip(arrays, touched, strict=True):
                kernels.scatter(array, where[cut], part)

    go_over(delta, dense if where is None else sparse, rule)
