"""One safetensors file: its header, its bytes, and errors for unreadable ones.

The library reads; it checks offsets and sizes before it allocates memory. This module writes,
because the library copies every array, and the SHA-256 is computed from the bytes being written.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlctl.errors import DlctlError

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


def header(path: Path, arrays: Mapping[str, Array]) -> tuple[bytes, list[Array]]:
    """The header of a file, and the arrays in its order: wide items first, aligned.

    Raises DlctlError naming `path` for a dtype that these files do not have.
    """
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
    return len(text).to_bytes(8, "little") + text, [arrays[name] for name in names]


def chunks(head: bytes, arrays: list[Array]) -> Iterator[bytes | memoryview]:
    """All bytes of a file, in pieces; the arrays are not copied."""
    import numpy as np

    from dlctl.util import pages

    yield head
    for array in arrays:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for i in range(0, len(data), CHUNK_BYTES):
            chunk = data[i : i + CHUNK_BYTES]
            yield chunk.data
            pages.free(chunk)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file. Read errors become a DlctlError naming it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise DlctlError(
            f"cannot read this part of the checkpoint: {why(error, path)}", where=str(path)
        ) from error


def why(error: Exception, path: Path) -> str:
    """The text of an error without the path, which the message has already."""
    text = getattr(error, "strerror", None) or str(error)
    return str(text).removesuffix(f": {path}")


def read(path: Path, file: Any, tensor: str) -> Array:
    """A whole tensor of an opened file. Raises DlctlError for a dtype that is never written."""
    _check_dtype(path, file, tensor)
    array: Array = file.get_tensor(tensor)
    return array


def _check_dtype(path: Path, file: Any, tensor: str) -> None:
    dtype = file.get_slice(tensor).get_dtype()
    if dtype not in DTYPES.values():
        raise DlctlError(f'"{tensor}" is {dtype}, which no checkpoint has', where=str(path))


def mapped(path: Path, file: Any, names: Iterable[str]) -> dict[str, Array]:
    """Memory-mapped tensors of an opened file: read-only, and resident only where accessed
    (`dlctl.util.pages`). Raises as `read`.
    """
    import numpy as np

    with path.open("rb") as stream:
        head_bytes = int.from_bytes(stream.read(8), "little")
        entries = json.loads(stream.read(head_bytes))
        buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    numpy_names = {name: dtype for dtype, name in DTYPES.items()}
    found: dict[str, Array] = {}
    for name in names:
        _check_dtype(path, file, name)
        dtype, shape = np.dtype(numpy_names[entries[name]["dtype"]]), entries[name]["shape"]
        at = 8 + head_bytes + entries[name]["data_offsets"][0]
        found[name] = np.frombuffer(buffer, dtype, math.prod(shape), at).reshape(shape)
    return found


def check(path: Path, file: Any, tensor: str, dtype: str, length: int) -> None:
    """Raises DlctlError unless an opened file has that tensor: [length], of the dtype ("F32")."""
    if tensor not in file.keys():  # noqa: SIM118 - not a mapping
        raise DlctlError(f'no tensor "{tensor}" in this file', where=str(path))
    found = file.get_slice(tensor)
    shape = found.get_shape()
    if shape != [length]:
        raise DlctlError(f'"{tensor}" has the shape {shape!s:.60}, not [{length}]', where=str(path))
    if found.get_dtype() != dtype:
        raise DlctlError(f'"{tensor}" is {found.get_dtype()}, not {dtype}', where=str(path))
