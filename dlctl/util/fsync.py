"""Files that survive a power loss: their content, and their names in the directory."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO


def sync_directory(directory: Path) -> None:
    """Flush all names in the directory to the disk. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path, mode: int = 0o666, *, syncs: bool = True) -> Iterator[IO[bytes]]:
    """A new file that replaces `path` when the block succeeds, and else is removed: a crash leaves
    the old file or the new one. syncs: so does a power loss. Raises OSError.

    At no moment can it be read by users that `mode` (less the umask) excludes, and a link of
    another user at its place is not followed.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
            yield file
            file.flush()
            if syncs:
                os.fsync(file.fileno())
        temporary.replace(path)
        if syncs:
            sync_directory(path.parent)
    finally:
        with suppress(OSError):  # On a read-only file system, even if the file does not exist.
            temporary.unlink(missing_ok=True)
