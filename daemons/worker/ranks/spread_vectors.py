"""Vectors of the method of a cut replica, in the memory of its ranks: each works on its own part.

A method, with the code that reads and writes for it, is one program in rank 0, which sees whole
vectors. All ranks share its elementwise operations, each on an even part of all elements; each rank
has its own compressor, which takes what is pushed from that part. So no rank touches a whole
vector; rank 0 moves received and sent data block by block. Any other numpy operation runs in rank
0, with the same result.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from daemons.worker.ranks.rank_memory import ALIGNED, FREE, PARAMETERS, VECTORS, RankMemory, others
from dlctl.compress.base import Compressor
from dlctl.compress.plain import joined
from dlctl.errors import DlctlError
from dlctl.model.flat import slice_bounds
from dlctl.model.vector import Spread, squared_norm
from dlctl.util import pages
from dlctl.wire.messages import Array, Json, Packed

ELEMENTWISE = {np.add, np.subtract, np.multiply, np.divide}
SCALARS = (int, float, np.float32)
ALIGNED_BYTES = 64
"""Alignment of pushed arrays, for any dtype."""
Answer = tuple[dict[str, Any], Sequence[Array]]
"""The answer of a rank to a piece of work."""


class Share:
    """A rank's part of the elements, the same in every vector."""

    def __init__(self, memory: RankMemory, rank: int, ranks: int, compressor: Compressor) -> None:
        """compressor: this rank's own, with its own random generator."""
        pages_of = slice_bounds(-(-memory.size // ALIGNED), ranks, rank)
        self.lo, self.hi = (min(n * ALIGNED, memory.size) for n in pages_of)
        self._memory, self._compressor = memory, compressor

    def work(self, op: str, lo: int, hi: int, operands: Sequence[Any], **more: Any) -> Answer:
        """Do this rank's part of an operation on the elements [lo, hi). operands: the result first;
        each is a vector, as [its number], or a scalar.
        """
        begin, lo, hi = lo, max(lo, self.lo), min(hi, self.hi)
        if lo >= hi:
            return {}, ()
        first, *rest = (
            self._memory.array(each[0], lo, hi) if isinstance(each, list) else each
            for each in operands
        )
        with np.errstate(all="ignore"):
            match op:
                case "copy":
                    np.copyto(first, rest[0])
                case "squares":
                    return {"squares": squared_norm(first)}, ()
                case "take":
                    return self._take(lo - begin, first, rest[0], **more)
                case _:
                    getattr(np, op)(*rest, out=first)
        return {}, ()

    def _take(self, begin: int, into: Array, u: Array, shard: int, settings: Json) -> Answer:
        """Compress a part. The packed arrays go into `into`, as far as they fit. begin: offset of
        this rank's elements in the whole.
        """
        for key, value in settings.items():
            setattr(self._compressor, key, value)
        packed = self._compressor.take(u, shard)
        room, at, forms, rest = into.view(np.uint8), 0, [], []
        for array in packed.arrays:
            end = at + -(-array.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
            if fits := end <= room.size:
                room[at : at + array.nbytes] = array.view(np.uint8)
            else:
                rest.append(array)
            forms.append([array.dtype.str, array.size, at if fits else -1])
            at = end if fits else at
        return {"part": [begin, packed.kind, packed.length, forms]}, rest


class SpreadVectors:
    """All vectors, as rank 0 sees and allocates them."""

    def __init__(
        self,
        memory: RankMemory,
        mine: Share,
        all_work: Callable[[Json], Sequence[Answer]],
        turn: threading.RLock,
    ) -> None:
        """all_work: has every rank do its part of a piece of work; returns their answers. turn:
        held by a thread while it makes a call to the ranks.
        """
        self.memory = memory
        self._mine, self._all_work, self._turn = mine, all_work, turn
        self._taken: dict[int, list[tuple[int, int]]] = {n: [] for n in range(FREE, VECTORS)}
        """Number of a vector -> its ranges in use."""
        self._pid = os.getpid()
        self._lock = threading.RLock()  # The garbage collector may free a vector at any time.
        self.parameters = self.seen_as(memory.array(PARAMETERS, 0, memory.size))

    def new(self, lo: int, hi: int) -> SpreadVector:
        """Allocate zeros at [lo, hi) of a vector. Raises DlctlError."""
        with self._lock:
            number = self._take(lo, hi)
        array = self.memory.array(number, lo, hi)
        weakref.finalize(array, self._is_unused, number, lo, hi).atexit = False
        return self.seen_as(array)

    def _take(self, lo: int, hi: int) -> int:
        for number, taken in self._taken.items():
            # Iterate over a copy: the garbage collector may remove ranges meanwhile.
            if not any(max(lo, a) < min(hi, b) for a, b in tuple(taken)):
                taken.append((lo, hi))
                return number
        raise DlctlError(
            f"a cut replica has room for {VECTORS - FREE} vectors, and its method uses all",
            hint="use a smaller servers.count, or a replica of one process",
        )

    def holding(self, values: Array) -> SpreadVector:
        """The values as a vector in the shared memory: themselves, or a copy there."""
        if isinstance(values, SpreadVector) and self.memory.place(values) is not None:
            return values
        other = self.new(0, self.memory.size)
        other[:] = values
        return other

    def _is_unused(self, number: int, lo: int, hi: int) -> None:
        if os.getpid() != self._pid:
            return  # A forked process drops its reference; its parent may still use the vector.
        with self._lock:
            self.memory.clear(number, lo, hi)
            self._taken[number].remove((lo, hi))

    def seen_as(self, array: Array) -> SpreadVector:
        vector = array.view(SpreadVector)
        vector.of = self
        return vector

    def free(self) -> None:
        """Unmap what rank 0 has read outside its own part."""
        mine = [(self._mine.lo, self._mine.hi)]
        for number in [number for number, taken in self._taken.items() if taken]:
            self.memory.free(number, others(mine, self.memory.size))

    def do(self, op: str, result: Any, *operands: Any, waits: bool = False, **more: Any) -> Any:
        """Have all ranks work on vectors; returns their answers. None: the operands are not the
        same range of vectors, or the ranks are busy and `waits` is False.
        """
        found: list[Any] = []
        bounds = set()
        for each in (result, *operands):
            if isinstance(each, SCALARS):
                found.append(float(each))
                continue
            at = self.memory.place(each) if isinstance(each, SpreadVector) else None
            if at is None:
                return None
            found.append([at[0]])
            bounds.add((at[1], at[1] + each.size))
        if len(bounds) != 1 or not self._turn.acquire(blocking=waits):
            return None
        try:
            ((lo, hi),) = bounds
            order = {"op": op, "lo": lo, "hi": hi, "operands": found, **more}
            is_mine = self._mine.lo <= lo and hi <= self._mine.hi
            return [self._mine.work(**order)] if is_mine else self._all_work(order)
        finally:
            self._turn.release()


class SpreadVector(Spread):
    of: SpreadVectors

    def __array_finalize__(self, other: Any) -> None:
        if isinstance(other, SpreadVector):
            self.of = other.of

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any
    ) -> Any:
        if ufunc in ELEMENTWISE and method == "__call__" and not options:
            first = next(each for each in (*inputs, *(out or ())) if isinstance(each, SpreadVector))
            result = out[0] if out else first.empty(0, first.size)
            if self.of.do(ufunc.__name__, result, *inputs) is not None:
                return result
        more = {"out": tuple(map(plain, out))} if out else {}
        found = getattr(ufunc, method)(*map(plain, inputs), **more, **options)
        return out[0] if out and len(out) == 1 else found

    def __setitem__(self, key: Any, value: Any) -> None:
        target = self[key] if isinstance(key, slice) else None
        if not isinstance(target, SpreadVector):
            plain(self)[key] = plain(value)
            return
        place = self.of.memory.place
        if isinstance(value, SpreadVector) and place(target) == place(value) is not None:
            return  # The operation was done in place.
        if self.of.do("copy", target, value) is None:
            if np.shape(value) == target.shape:
                pages.copy(plain(target), plain(value))
            else:
                plain(target)[:] = value

    def copy(self, order: Any = "C") -> SpreadVector:
        other = self.empty(0, self.size)
        other[:] = self
        return other

    def empty(self, lo: int, hi: int) -> SpreadVector:
        _, begin = self.of.memory.place(self) or (0, 0)
        return self.of.new(begin + lo, begin + hi)

    def squared_norm(self) -> float:
        answers = self.of.do("squares", self)
        if answers is None:
            return squared_norm(plain(self))
        return float(sum(header.get("squares", 0.0) for header, _ in answers))

    def packed(self, shard: int, settings: Json) -> Packed:
        into = self.empty(0, self.size)
        answers = self.of.do("take", into, self, waits=True, shard=shard, settings=settings)
        if answers is None:  # It is not in the shared memory: another numpy operation made it.
            other = self.copy()
            packed = other.packed(shard, settings)
            self[:] = other
            return packed
        return joined([_part(plain(into), *answer) for answer in answers if answer[0]])


def _part(into: Array, header: Json, rest: Sequence[Array]) -> Packed:
    """The packed part of one rank."""
    begin, kind, length, forms = header["part"]
    left = list(rest)
    room = into.view(np.uint8)
    arrays = []
    for dtype, size, at in forms:
        nbytes = np.dtype(dtype).itemsize * size
        here = room[4 * begin + at : 4 * begin + at + nbytes] if at >= 0 else None
        arrays.append(left.pop(0) if here is None else here.view(dtype))
    return Packed(kind, length, tuple(arrays))


def plain(each: Any) -> Any:
    """A vector as an ordinary numpy array in the same memory."""
    return each.view(np.ndarray) if isinstance(each, SpreadVector) else each
