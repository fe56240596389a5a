"""The frozen parameters of a model: equal in all workers, never trained, in their own dtypes.

Every worker builds them on its own and reports the digests of their bytes. Those of the first
worker are the run's: it writes them to a file, once, which every checkpoint refers to. A worker
that has built other values reads only those tensors from the file. This module defines the name of
the file and its layout; it is a .safetensors file, and depends on the model's layout alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dlctl.errors import DlctlError
from dlctl.model.flat import CONSTANT, Layout, TensorEntry

FOLDER = "frozen"
"""The directory of the frozen parameters in a run directory."""
DIGEST_BYTES = 16
"""Bytes that are stored of the SHA-256 of each tensor's content."""
DTYPES = {
    "float64": ("F64", 8), "int64": ("I64", 8), "uint64": ("U64", 8),
    "float32": ("F32", 4), "int32": ("I32", 4), "uint32": ("U32", 4),
    "float16": ("F16", 2), "bfloat16": ("BF16", 2), "int16": ("I16", 2), "uint16": ("U16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
    "int8": ("I8", 1), "uint8": ("U8", 1), "bool": ("BOOL", 1),
}  # fmt: skip
"""torch's name -> that of the files, and bytes of an element."""
_ALIGNMENT_BYTES = 8
Range = tuple[int, int]
"""Bytes [lo, hi) of the file."""


def entries(layout: Layout) -> list[TensorEntry]:
    """The frozen parameters in their order, which is that of all digests."""
    return [entry for entry in layout.entries if entry.kind == CONSTANT]


@dataclass(frozen=True, slots=True)
class FrozenPlan:
    """The file of a layout. `head`: its first bytes; the tensors follow, wide items first."""

    head: bytes
    places: tuple[Range, ...]
    """The position of each tensor in the file, in the order of `entries`."""

    @property
    def nbytes(self) -> int:
        return max((hi for _, hi in self.places), default=len(self.head))

    @property
    def order(self) -> list[int]:
        """The tensors in the order of the file."""
        return sorted(range(len(self.places)), key=lambda n: self.places[n])

    def ranges(self, wanted: Iterable[int]) -> tuple[Range, ...]:
        """The ranges to read for these tensors. Always including the last byte, so that a sparse
        copy has the right size.
        """
        places = {*(self.places[n] for n in wanted), (self.nbytes - 1, self.nbytes)}
        return tuple(sorted(place for place in places if place[0] < place[1]))


def plan(layout: Layout) -> FrozenPlan:
    """Plan the file of a layout. Raises DlctlError for a dtype that is not in `DTYPES`."""
    frozen = entries(layout)
    for entry in frozen:
        if entry.dtype not in DTYPES:
            raise DlctlError(f'frozen parameter "{entry.name:.200}" is {entry.dtype:.60}')
    by_width = sorted(range(len(frozen)), key=lambda n: (-DTYPES[frozen[n].dtype][1], n))
    at, offsets, described = 0, {}, {}
    for n in by_width:
        entry = frozen[n]
        dtype, width = DTYPES[entry.dtype]
        offsets[n] = (at, at + width * entry.size)
        described[entry.name] = {
            "dtype": dtype, "shape": [*entry.shape], "data_offsets": [*offsets[n]]
        }  # fmt: skip
        at = offsets[n][1]
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    head = len(text).to_bytes(8, "little") + text
    places = (offsets[n] for n in range(len(frozen)))
    return FrozenPlan(head, tuple((len(head) + lo, len(head) + hi) for lo, hi in places))


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """The digest of the bytes of one tensor."""
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]


def fits(layout: Layout, digests: bytes) -> bool:
    """Whether there is one digest for each frozen parameter."""
    return len(digests) == DIGEST_BYTES * len(entries(layout))


def differing(mine: bytes, theirs: bytes) -> list[int]:
    """The positions of the tensors whose digests differ."""
    pairs = zip(_cut(mine), _cut(theirs), strict=True)
    return [n for n, (own, other) in enumerate(pairs) if own != other]


def _cut(digests: bytes) -> Iterator[bytes]:
    return (digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES))


def file_name(layout: Layout, digests: bytes) -> str:
    """The file name, by names, shapes, dtypes and values: equal parameters have the same file."""
    return f"frozen-{digest(plan(layout).head + digests).hex()}.safetensors"


def run_file(layout: Layout, digests: bytes) -> str:
    """The path of the parameters' file, relative to the run directory."""
    return f"{FOLDER}/{file_name(layout, digests)}"
