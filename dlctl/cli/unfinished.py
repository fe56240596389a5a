"""Run directories that are being made: how they are marked, and removed if the maker was killed.

A directory of somebody else's may have a name like a run's ("mnist-2024"). So only what carries
our mark, and holds nothing but what we put there ourselves, is ever removed.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dlctl import rundb

MARK = ".dlctl-unfinished"
_RUN_ID_END = re.compile(r"-[0-9a-f]{4}$")
_FILES = (MARK, "job.toml", "job.json", "key", *(rundb.FILE + s for s in ("", "-wal", "-shm")))
_TEMPORARY = re.compile(r"\.(job\.toml|job\.json|key)\.[0-9a-f]{8}\.tmp")
LOGS = "logs"


def mark(directory: Path) -> None:
    """Say that this new directory is ours and not yet a run. Raises OSError."""
    (directory / MARK).touch(exist_ok=False)


def unmark(directory: Path) -> None:
    """Say that it has become a run, which is never removed unasked. Raises OSError."""
    (directory / MARK).unlink()


def sweep(parent: Path, name: str) -> None:
    """Remove directories that a killed command has begun to make and that never became runs."""
    for directory in parent.glob(f"{name}-????"):
        if directory.is_symlink() or not _RUN_ID_END.search(directory.name):
            continue
        try:
            if not _is_marked(directory):
                continue
            with held(directory):
                _remove_if_ours(directory)
        except OSError:  # somebody makes it just now, or it cannot be removed
            continue


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Make known that this directory is being filled. Raises BlockingIOError if it is already."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _is_marked(directory: Path) -> bool:
    path = directory / MARK
    return path.is_file() and not path.is_symlink()


def _remove_if_ours(directory: Path) -> None:
    """File by file, the mark last: what somebody puts there meanwhile stays, and so does its place.

    Raises OSError if that happens.
    """
    entries = list(directory.iterdir())
    if not _is_marked(directory) or not all(map(_is_ours, entries)):
        return
    for entry in sorted(entries, key=lambda path: path.name == MARK):
        if entry.name == LOGS:
            entry.rmdir()
        else:
            entry.unlink()
    directory.rmdir()


def _is_ours(path: Path) -> bool:
    if path.is_symlink():
        return False
    if path.name == LOGS:
        return path.is_dir() and not any(path.iterdir())
    return path.is_file() and (path.name in _FILES or bool(_TEMPORARY.fullmatch(path.name)))
