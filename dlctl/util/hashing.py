"""The checksum of a file, read piece by piece, with progress reports for large files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import IO

PIECE_BYTES = 1 << 18
Progress = Callable[[], None]
"""Called whenever a piece has been read."""


def no_progress() -> None:
    """Does not report any progress."""


def sha256_of(file: IO[bytes], nbytes: int, progress: Progress = no_progress) -> str:
    """SHA-256 (hexadecimal) of the next `nbytes` bytes of a file, or of as many as there are.

    It terminates even for a file that keeps growing. Raises OSError.
    """
    digest, left = hashlib.sha256(), nbytes
    while piece := file.read(min(left, PIECE_BYTES)):
        digest.update(piece)
        left -= len(piece)
        progress()
    return digest.hexdigest()
