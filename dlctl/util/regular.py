"""Opening a file by its name if it is a regular file, and nothing else.

Any file that comes from outside may be something else by that name: opening a FIFO waits until
another process writes to it, reading a device may never end.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
PIECE_BYTES = 1 << 20
_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class NotRegular(OSError):
    """The path is no regular file, as in "it is a FIFO, not a regular file"."""

    def __init__(self, path: Path | str, mode: int) -> None:
        self.kind = kind(mode)
        super().__init__(errno.EINVAL, f"it is {self.kind}, not a regular file", str(path))

    def __str__(self) -> str:
        return f"{self.filename} is {self.kind}, not a regular file"


def kind(mode: int) -> str:
    """What a file of this `st_mode` is: "a FIFO"."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def check(path: Path) -> None:
    """Raises NotRegular; not for a file that does not exist. For a library that opens the file by
    its name itself, and whose locks closing another descriptor of the file would release (SQLite).
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        _check(path, path.stat().st_mode)


def descriptor(
    path: Path | str, flags: int = os.O_RDONLY, mode: int = 0o666, *, at: int | None = None
) -> int:
    """`os.open` without a wait, relative to the directory `at`. Raises NotRegular and OSError."""
    try:
        found = os.open(path, flags | _FLAGS, mode, dir_fd=at)
    except OSError:  # As a socket, a FIFO without a reader, a link that is not to be followed.
        with suppress(FileNotFoundError):
            is_followed = not flags & os.O_NOFOLLOW
            _check(path, os.stat(path, dir_fd=at, follow_symlinks=is_followed).st_mode)
        raise
    try:
        _check(path, os.fstat(found).st_mode)
        os.set_blocking(found, True)
    except BaseException:
        os.close(found)
        raise
    return found


def opened(path: Path, flags: int = os.O_RDONLY) -> IO[bytes]:
    """The file, for reading. Raises NotRegular and OSError."""
    return os.fdopen(descriptor(path, flags), "rb")


def read_bytes(path: Path) -> bytes:
    """Read a regular file. Raises NotRegular and OSError."""
    with opened(path) as file:
        return file.read()


def pieces(path: Path) -> Iterator[bytes]:
    """Its content, for a file that may be larger than the memory. Raises NotRegular and OSError."""
    with opened(path) as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def name_of(file: IO[bytes]) -> str:
    """A path of this open file, for a library that opens it by name once more."""
    return f"/proc/self/fd/{file.fileno()}"


def _check(path: Path | str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise NotRegular(path, mode)
