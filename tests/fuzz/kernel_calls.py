"""The loops in C, called with arrays of any lengths, alignments and bits.

An input is an entry point, the lengths by which its arrays differ, and their bytes. A call writes
into its outputs only, refuses lengths that do not fit, and gives numpy's result where that is one
expression. Without the loops there is nothing to call.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import numpy as np

from dlctl import kernels
from dlctl.compress import bfloat16

from . import mutation

NAME = "kernels"
MEMORY_BYTES = 2_000_000
MEMORY_PER_BYTE = 60
SIZE_MAX = 5_000
"""Elements of an array: more than a loop that holds the interpreter's lock."""
GUARD = 64
ROW = 1024
SLOTS = {"sgd": (0, 2), "momentum": (1, 4), "adagrad": (1, 2), "rmsprop": (2, 5), "adam": (2, 7),
         "yogi": (2, 5), "lion": (1, 6), "nesterov_arrives": (2, 3), "nesterov_steps": (2, 4),
         "accrue": (0, 1)}  # fmt: skip
"""Rule -> its slots and its constants."""
HALVES = ("half", "bfloat")
ENTRIES = [*SLOTS, *(f"{name}_{kind}" for kind in HALVES for name in kernels.Halves._fields),
           "gather", "scatter", "from_signs", "squares", "are_finite",
           "pack_positions", "unpack_positions"]  # fmt: skip


def seeds() -> list[bytes]:
    """Each entry point, with ordinary numbers."""
    values = np.random.default_rng(0).standard_normal(4200).astype(np.float32).tobytes()
    return [bytes([entry, 0, 0, 0]) + values for entry in range(len(ENTRIES))]


def mutate(random: Random, data: bytes, other: bytes) -> bytes:
    return mutation.mutate(random, data, other, [b"\x00\x00\x80\x7f", b"\x01\xfc", b"\xff" * 8])


def target(data: bytes) -> None:
    if kernels.missing() or len(data) < 4:
        return
    name, differ, flags = ENTRIES[data[0] % len(ENTRIES)], data[1] % 3, data[2]
    of = _Arrays(data[4:], data[3] % 8 if data[3] > 200 else 0)
    if name in SLOTS:
        _rule(name, of, differ, flags)
    elif name in ("gather", "scatter"):
        _copies(name, of, differ, flags)
    elif name == "from_signs":
        _signs(of, differ)
    elif name in ("squares", "are_finite"):
        _check(name, of)
    elif name.endswith("_positions"):
        _positions(name, of, differ, flags)
    else:
        _conversion(name, of, differ)


class _Arrays:
    """Arrays with these bytes again and again, guarded on both sides."""

    def __init__(self, data: bytes, shift: int) -> None:
        """shift: the bytes by which the content is turned."""
        self._data = np.frombuffer((data[shift:] + data[:shift]) or b"\0", np.uint8)
        self._made: list[Any] = []
        self.size = min(len(data) // 4, SIZE_MAX)

    def make(self, size: int, dtype: Any) -> Any:
        nbytes = max(0, size) * np.dtype(dtype).itemsize
        memory = np.full(nbytes + 2 * GUARD, 0xA5, np.uint8)
        memory[GUARD : GUARD + nbytes] = np.resize(self._data, nbytes)
        self._made.append(memory)
        return memory[GUARD : GUARD + nbytes].view(dtype)

    def check(self) -> None:
        for memory in self._made:
            assert (memory[:GUARD] == 0xA5).all()
            assert (memory[-GUARD:] == 0xA5).all()


@cache
def _entry(name: str) -> Any:
    return getattr(kernels._loaded()[0], name)


def _call(name: str, of: _Arrays, fits: bool, *arguments: Any) -> bool:
    """Whether it has done it. fits: the lengths of the arrays do."""
    try:
        _entry(name)(*arguments)
    except ValueError:
        assert not fits
        return False
    except IndexError:
        assert name in ("gather", "scatter")
        return False
    finally:
        of.check()
    assert fits
    return True


def _rule(name: str, of: _Arrays, differ: int, flags: int) -> None:
    slots, constants = SLOTS[name]
    w, g = of.make(of.size, np.float32), of.make(of.size + differ, np.float32)
    now = tuple(of.make(of.size, np.float32) for _ in range(slots))
    is_in_place = bool(flags & 1)
    following = now if is_in_place else tuple(of.make(of.size, np.float32) for _ in now)
    w_next = w if is_in_place else of.make(of.size, np.float32)
    before = w.copy(), g.copy()
    numbers = tuple(float(number) for number in np.linspace(0.1, 0.9, constants))
    if _call(name, of, differ == 0, numbers, w, g, w_next, now, following):
        assert np.array_equal(g, before[1], equal_nan=True)
        if name == "sgd":
            with np.errstate(all="ignore"):
                lr, decay = (np.float32(number) for number in numbers)
                wanted = before[0] - (before[0] * decay + before[1]) * lr
            assert np.array_equal(w_next, wanted, equal_nan=True)


def _conversion(name: str, of: _Arrays, differ: int) -> None:
    what, _, kind = name.partition("_")
    types = (np.float32, np.uint16) if what == "narrow" else (np.uint16, np.float32)
    source, out = of.make(of.size, types[0]), of.make(of.size + differ, types[1])
    before = out.copy()
    if not _call(name, of, differ == 0, source, out):
        return
    with np.errstate(all="ignore"):
        if what == "narrow":
            as_half = bfloat16.encode if kind == "bfloat" else _half
            assert np.array_equal(_wide(out, kind), _wide(as_half(source), kind), equal_nan=True)
        else:
            wide = _wide(source, kind)
            wanted = wide if what == "widen" else before - wide
            assert np.array_equal(out, wanted, equal_nan=True)


def _signs(of: _Arrays, differ: int) -> None:
    rows = -(-of.size // ROW)
    bits, means = of.make(-(-of.size // 8), np.uint8), of.make(2 * rows + differ, np.uint32)
    out = of.make(of.size, np.uint32)
    if _call("from_signs", of, differ == 0, bits, means, out):
        flags = np.unpackbits(bits, count=of.size, bitorder="little").view(bool)
        ones, zeros = (np.repeat(part, ROW)[: of.size] for part in (means[:rows], means[rows:]))
        assert np.array_equal(out, np.where(flags, ones, zeros))


def _check(name: str, of: _Arrays) -> None:
    values = of.make(of.size, np.float32)
    found = _entry(name)(values)
    of.check()
    is_finite = bool(np.isfinite(values).all())
    if name == "are_finite":
        assert found is is_finite
        return
    with np.errstate(all="ignore"):
        exact = values.astype(np.float64)
        assert np.isclose(found, exact @ exact, rtol=1e-3, atol=1e-30) or not found < 1e38
        assert is_finite or not np.isfinite(found)


def _positions(name: str, of: _Arrays, differ: int, bits: int) -> None:
    """Whatever is unpacked, it ascends below the size, and is packed to the same bytes."""
    count, bits = of.size // 8, bits % 64
    low = of.make(-(-count * bits // 8) + differ, np.uint8)
    mask, positions = of.make(of.size, np.uint8), of.make(count, np.int64)
    fits = bits <= 56 and differ == 0
    if name == "pack_positions":
        positions[:] = np.cumsum(np.abs(positions) % 9 + 1)
        low[:], mask[:] = 0, 0
        is_room = not count or (positions[-1] >> bits) + count <= 8 * mask.size
        _call(name, of, fits, positions, bits, low, mask) if is_room else None
        return
    if not fits:
        _call(name, of, fits, positions, bits, low, mask, 1 << 40)
        return
    is_done = _entry(name)(positions, bits, low, mask, 1 << 40)
    of.check()
    if not is_done:
        return
    again = np.zeros_like(low), np.zeros_like(mask)
    _entry("pack_positions")(positions, bits, *again)
    assert (np.diff(positions) > 0).all()
    assert not count or 0 <= positions[0] <= positions[-1] < 1 << 40
    assert np.array_equal(again[1], mask)


def _half(values: Any) -> Any:
    return values.astype(np.float16).view(np.uint16)


def _wide(values: Any, kind: str) -> Any:
    if kind == "bfloat":
        return bfloat16.decode(values)
    return values.view(np.float16).astype(np.float32)


def _copies(name: str, of: _Arrays, differ: int, flags: int) -> None:
    value = np.float64 if flags & 1 else np.float32
    position = np.int64 if flags & 2 else np.uint32
    array = of.make(of.size, value)
    where = of.make(of.size // 2, position)
    if flags & 4 and of.size:  # Else hardly any position is in the array.
        where %= of.size
    some = of.make(where.size + differ, value)
    before = array.copy()
    if _call(name, of, differ == 0, array, where, some):
        if name == "gather":
            assert np.array_equal(some, array[where], equal_nan=True)
        else:
            before[where] = some
            assert np.array_equal(array, before, equal_nan=True)
