"""The run's terms, the fencing tokens of slots and shards, in a file that only grows.

    server-0=2 worker-0=3 67b9f769

A line has the terms that were issued together, and the CRC-32 of what is before it, in hexadecimal
digits. It is synced before one of its terms is sent, and before the next line is appended. So a
crash or a power loss can tear only the last line, whose terms nobody has: cut off, or with zeros in
the place of blocks that were not written. It is not counted, and overwritten.

Anything else that is not as it was written is damage, and no term is issued any more: it could be
one that a process has. Zeros are damage, too, if there is a whole line behind them.

Runs of earlier versions have their terms in the database. The first coordinator that opens them
appends these.
"""

from __future__ import annotations

import errno
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from dlctl.errors import DlctlError
from dlctl.records.memory import DAEMON, Memory
from dlctl.runs.database import RunDb
from dlctl.util import regular
from dlctl.util.fsync import sync_directory

FILE = "terms"
_SUM_BYTES = 9


class File(Protocol):
    def read(self) -> bytes:
        """All of it; b"" if it does not exist. Raises OSError."""

    def write(self, at: int, data: bytes) -> None:
        """Truncate it to `at` bytes, and append these. Raises OSError."""

    def write_again(self, at: int, data: bytes) -> None:
        """Write bytes that it has at this place: the disk may lack them. Raises OSError."""

    def sync(self) -> None:
        """Make it survive a power loss. Raises OSError."""


class TermLog:
    """The file, for appending; by one process at a time. It is not touched before `append`."""

    def __init__(self, file: File, before: Mapping[str, int] = MappingProxyType({})) -> None:
        """before: terms known from elsewhere; those that are newer are appended, too.

        Raises DlctlError if the file is damaged, or cannot be read.
        """
        self._file = file
        known, lines = _read(file)
        self._size = len(lines)
        self._inherited = lines[lines.rfind(b"\n", 0, -1) + 1 :]
        """The last line of a predecessor, until it is known to be on the disk."""
        self._news = {name: term for name, term in before.items() if term > known.get(name, -1)}
        self.is_synced = False
        """All of them are on the disk. Of what a predecessor has appended this is not known."""

    def issue(self, name: str, term: int) -> None:
        """Queue a term for the next `append`."""
        self._news[name], self.is_synced = term, False

    def append(self) -> None:
        """Append and sync what is new. Raises OSError; then nothing of it counts, and the next call
        tries again.
        """
        if self.is_synced:
            return
        self._sync_inherited()
        line = _line(self._news) if self._news else b""
        self._file.write(self._size, line)
        self._file.sync()
        self._size += len(line)
        self._news, self.is_synced = {}, True

    def _sync_inherited(self) -> None:
        """A predecessor may have died after a sync that failed. Then Linux has its last line in
        memory, reads it from there, and takes it for written: no sync will write it. With another
        line behind it, a power loss would leave damage.
        """
        if self._inherited:
            self._file.write_again(self._size - len(self._inherited), self._inherited)
            self._file.sync()
            self._inherited = b""


class OnDisk:
    """The file of a run directory. It is created by the first `write`."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._descriptor: int | None = None
        self._is_named = False
        """The directory entry of the file is on the disk."""

    def read(self) -> bytes:
        with suppress(FileNotFoundError):
            return regular.read_bytes(self._path)
        return b""

    def write(self, at: int, data: bytes) -> None:
        os.ftruncate(self._opened(), at)
        self.write_again(at, data)

    def write_again(self, at: int, data: bytes) -> None:
        if os.pwrite(self._opened(), data, at) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def _opened(self) -> int:
        if self._descriptor is None:
            self._descriptor = regular.descriptor(self._path, os.O_RDWR | os.O_CREAT)
        return self._descriptor

    def sync(self) -> None:
        assert self._descriptor is not None
        os.fsync(self._descriptor)
        if not self._is_named:
            sync_directory(self._path.parent)
            self._is_named = True

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def newest(directory: Path, db: RunDb) -> dict[str, int]:
    """The newest terms of a run. Raises DlctlError if they are damaged, or cannot be read.

    Those that a coordinator remembered of its daemons count, too: if the last line of the file is
    unreadable, it is unknown whether it was torn or damaged.
    """
    try:
        known, _ = _read(OnDisk(directory))
    except DlctlError as error:
        raise DlctlError(
            f"cannot use the run's terms: {error.message}",
            where=str(directory / FILE),
            hint=f"dlctl recover --dry-run -j {directory.name}",
        ) from error
    rows = Memory(db.memory()).under(DAEMON)
    remembered = [(name, row.get("term", 0)) for name, row in rows]
    for name, term in (*db.old_terms().items(), *remembered):
        if term > known.get(name, 0):
            known[name] = term
    return known


def carry_over(directory: Path, db: RunDb) -> None:
    """Put the newest terms of a run in the file, and sync it, before the coordinator's memory is
    cleared: some may be remembered only. Raises DlctlError as `newest` does, and OSError.
    """
    with closing(OnDisk(directory)) as file:
        TermLog(file, newest(directory, db)).append()


def damage(directory: Path) -> str:
    """What is wrong with the file, as in "line 3 of terms is not what was written"; "" if nothing
    is.
    """
    try:
        _read(OnDisk(directory))
    except DlctlError as error:
        return error.message
    return ""


def in_lines(data: bytes) -> tuple[dict[str, int], int]:
    """The newest terms, and the length of the lines that count. Raises ValueError for damage."""
    known, size = dict[str, int](), 0
    lines = re.findall(rb"[^\n]*\n|[^\n]+", data)
    for number, line in enumerate(lines, 1):
        text, rest = line[:-_SUM_BYTES], line[-_SUM_BYTES:]
        if rest == _sum(text):
            pairs = (pair.partition("=") for pair in text.decode().split())
            known |= {name: int(term) for name, _, term in pairs}
            size += len(line)
        elif number < len(lines) or _has_another(line):
            raise ValueError(f"line {number} of {FILE} is not what was written")
    return known, size


def _has_another(line: bytes) -> bool:
    """Whether an unreadable last line is more than one line that was torn: there is a whole line in
    it, and something behind that, or zeros in front.
    """
    first, *behind_zeros = line.split(b"\0")
    return any(line[end:].strip(b"\0") for end in _ends(first)) or any(
        end for piece in behind_zeros for end in _ends(piece)
    )


def _ends(piece: bytes) -> Iterator[int]:
    """Where a whole line ends that the piece begins with, its newline included."""
    crc = 0
    for at in range(1, len(piece) - _SUM_BYTES + 2):
        crc = zlib.crc32(piece[at - 1 : at], crc)
        if piece[at : at + _SUM_BYTES - 1] == b"%08x" % crc:
            yield at + _SUM_BYTES


def _line(terms: Mapping[str, int]) -> bytes:
    text = "".join(f"{name}={term} " for name, term in sorted(terms.items())).encode()
    return text + _sum(text)


def _sum(text: bytes) -> bytes:
    return b"%08x\n" % zlib.crc32(text)


def _read(file: File) -> tuple[dict[str, int], bytes]:
    """The newest terms, and the lines that count."""
    try:
        data = file.read()
        known, size = in_lines(data)
    except ValueError as error:
        raise DlctlError(str(error)) from error
    except OSError as error:
        raise DlctlError(f"{FILE} cannot be read: {error}") from error
    return known, data[:size]
