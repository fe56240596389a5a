"""One safetensors file: its header, its bytes, and errors for unreadable ones.

The library checks its offsets and sizes. This module writes and maps it, because the library copies
every array, and the SHA-256 is computed from the bytes being written.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlctl.errors import DlctlError
from dlctl.util import regular

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

CHUNK_BYTES = 4 * 2**20
_ALIGNMENT_BYTES = 8
DTYPES = {
    "<f8": "F64", "<i8": "I64", "<f4": "F32", "<i4": "I32", "<u4": "U32",
    "<f2": "F16", "<u2": "U16", "|u1": "U8",
}  # fmt: skip
"""numpy's names and those of the files."""


def chunks(path: Path, arrays: Mapping[str, Array]) -> Iterator[bytes | memoryview]:
    """All bytes of a file, in pieces: wide items first, aligned; the arrays are not copied.

    Raises DlctlError naming `path` for a dtype that these files do not have.
    """
    import numpy as np

    from dlctl.util import pages

    entries: dict[str, Any] = {}
    offset = 0
    names = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    for name in names:
        array = arrays[name]
        if array.dtype.str not in DTYPES:
            raise DlctlError(f'cannot save "{name}": it is {array.dtype}', where=str(path))
        end = offset + array.nbytes
        dtype = DTYPES[array.dtype.str]
        entries[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        data = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
        for i in range(0, len(data), CHUNK_BYTES):
            chunk = data[i : i + CHUNK_BYTES]
            yield chunk.data
            pages.free(chunk)


def read(path: Path) -> dict[str, Array]:
    """The tensors of a file by name: memory-mapped, read-only, and resident only where accessed
    (`dlctl.util.pages`).

    Raises DlctlError naming the file if it is unreadable or has a dtype that no checkpoint has.
    """
    import numpy as np
    from safetensors import SafetensorError, safe_open

    numpy_names = {name: dtype for dtype, name in DTYPES.items()}
    found: dict[str, Array] = {}
    try:
        with regular.opened(path) as file, safe_open(regular.name_of(file), framework="np"):
            head_bytes = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(head_bytes))
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            if (dtype := numpy_names.get(entry["dtype"])) is None:
                raise ValueError(f'"{name}" is {entry["dtype"]}, which no checkpoint has')
            at = 8 + head_bytes + entry["data_offsets"][0]
            found[name] = np.ndarray(entry["shape"], np.dtype(dtype), buffer, at)
    except (SafetensorError, OSError, ValueError, OverflowError) as error:
        raise DlctlError(
            f"cannot read this part of the checkpoint: {why(error, path)}", where=str(path)
        ) from error
    return found


def why(error: Exception, path: Path) -> str:
    """The text of an error without the path, which the message has already."""
    text = getattr(error, "strerror", None) or str(error)
    return str(text).removesuffix(f": {path}")


def vector(path: Path, tensor: str, dtype: str, length: int) -> Array:
    """A tensor that a file has to have: dtype[length], as by `read`. Raises DlctlError."""
    found = read(path).get(tensor)
    if found is None:
        raise DlctlError(f'no tensor "{tensor}" in this file', where=str(path))
    if found.shape != (length,):
        shape = str(list(found.shape))
        raise DlctlError(f'"{tensor}" has the shape {shape:.60}, not [{length}]', where=str(path))
    if found.dtype != dtype:
        raise DlctlError(f'"{tensor}" is {found.dtype}, not {dtype}', where=str(path))
    return found
