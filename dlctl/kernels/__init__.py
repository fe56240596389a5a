"""Loops in C for the servers, where they were built; numpy does the same without them, but slower.

The build (`hatch_build.py`) compiles `kernels.c` into this folder and records what it has built
from what. A library that is missing, damaged, or built from another source is not loaded:
`missing()` says why. `DLCTL_KERNELS=off` leaves it unused. The results are the same to the bit, so
servers with and without it may follow each other.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dlctl.util import regular

SWITCH = "DLCTL_KERNELS"
FOLDER = Path(__file__).parent
SOURCE = FOLDER / "kernels.c"
LIBRARY = FOLDER / "_kernels.abi3.so"
RECORD = FOLDER / "built.json"
"""{"source": SHA-256, "library": SHA-256} of what was built from what."""

Array = npt.NDArray[Any]
Step = Callable[[tuple[float, ...], Array, Array, Array, Sequence[Array], Sequence[Array]], bool]
"""step(constants, w, g, w_next, slots, slots_next), contiguous arrays of float32 and of one length:
one update of these elements. Returns whether an operation overflowed, divided by zero or was
invalid. An output is its input, or memory that does not overlap. All are aligned."""


def missing() -> str:
    """Why nothing runs in C; empty: it does."""
    return _loaded()[1]


def step(name: str) -> Step | None:
    """The rule of this name; None: there is none in C."""
    return _steps().get(name)


class Halves(NamedTuple):
    """Conversions of contiguous arrays of one length: float32, and 16 bits."""

    narrow: Callable[[Array, Array], bool]
    """(float32, 16 bits): rounded to the nearest, ties to even. Returns whether some are not finite
    or too large."""
    widen: Callable[[Array, Array], bool]
    """(16 bits, float32)"""
    rest: Callable[[Array, Array], bool]
    """(16 bits, float32): subtracts the former."""


def halves(kind: Literal["half", "bfloat"]) -> Halves | None:
    """Of float16 or bfloat16; None: there are none in C."""
    module = _loaded()[0]
    if module is None:
        return None
    return Halves(*(getattr(module, f"{name}_{kind}") for name in Halves._fields))


def from_signs() -> Callable[[Array, Array, Array], None] | None:
    """(bits, means, out): `OneBit.expand`, of contiguous uint8 and float32; None: not in C."""
    module = _loaded()[0]
    return None if module is None else module.from_signs


def pack_positions(positions: Array, bits: int, low: Array, mask: Array) -> int | None:
    """Add int64[n], strictly increasing, to the zeros `low` and `mask`, uint8, as
    `compress/indices.py` codes them. Returns the length of the mask in bits; None: not in C."""
    module = _loaded()[0]
    if module is None or positions.dtype != np.int64 or not takes(positions):
        return None
    found: int = module.pack_positions(positions, bits, low, mask)
    return found


def unpack_positions(out: Array, bits: int, low: Array, mask: Array, size: int) -> bool:
    """Undo it: positions below `size`, into int64[n]. False: not in C, or these are no n positions;
    `out` has anything then."""
    module = _loaded()[0]
    if module is None or not (takes(low) and takes(mask)):
        return False
    could: bool = module.unpack_positions(out, bits, low, mask, size)
    return could


def squares(array: Array) -> float | None:
    """About the sum of the squares of float32[n], which need not be the last bits of numpy's; None:
    not in C. Infinite or NaN if an element is, or if squares overflow."""
    module = _loaded()[0]
    if module is None or array.dtype != np.float32 or not takes(array):
        return None
    found: float = module.squares(array)
    return found


def are_finite(array: Array) -> bool | None:
    """Whether no element of float32[n] is infinite or NaN; None: not in C."""
    module = _loaded()[0]
    if module is None or array.dtype != np.float32 or not takes(array):
        return None
    found: bool = module.are_finite(array)
    return found


def takes(array: Array) -> bool:
    """Whether C may read this array: what came in a message may begin at any byte."""
    return type(array) is np.ndarray and array.flags.c_contiguous and array.flags.aligned


def gather(array: Array, positions: Array, out: Array) -> None:
    """out[:] = array[positions], contiguous, elements and positions of 4 or 8 bytes.

    The positions are within the array: they were checked on arrival. (C raises IndexError.)
    """
    module = _loaded()[0]
    if module is None or not positions.flags.aligned:  # As of a part of a message.
        np.take(array, positions, out=out, mode="clip")  # To check again, it would copy `out`.
    else:
        module.gather(array, positions, out)


def scatter(array: Array, positions: Array, values: Array) -> None:
    """array[positions] = values, as in `gather`."""
    module = _loaded()[0]
    if module is None or not (positions.flags.aligned and values.flags.aligned):
        array[positions] = values
    else:
        module.scatter(array, positions, values)


@cache
def _steps() -> dict[str, Step]:
    module = _loaded()[0]
    return {} if module is None else {name: getattr(module, name) for name in module.RULES.split()}


@cache
def _loaded() -> tuple[Any, str]:
    """(the module or None, why it is missing)."""
    if os.environ.get(SWITCH) == "off":
        return None, f"{SWITCH}=off"
    if why := _fault():
        return None, why
    try:
        return importlib.import_module("dlctl.kernels._kernels"), ""
    except ImportError as error:
        return None, f"it cannot be loaded: {error}"


def _fault() -> str:
    """Why the library must not be loaded; empty: it may be."""
    if not (LIBRARY.is_file() and RECORD.is_file()):
        return "it was not built: there was no working C compiler, or no Python.h"
    try:
        built = json.loads(regular.read_bytes(RECORD))
        found = {"source": digest(SOURCE), "library": digest(LIBRARY)}
    except (OSError, ValueError) as error:
        return f"it cannot be read: {error}"
    if not isinstance(built, dict) or built.get("library") != found["library"]:
        return "the library is damaged"
    if built.get("source") != found["source"]:
        return "it was built from another version of dlctl"
    return ""


def digest(path: Path) -> str:
    return hashlib.sha256(regular.read_bytes(path)).hexdigest()
