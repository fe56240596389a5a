"""Run directories that are being made: how they are marked, and removed if the maker was killed.

A directory of somebody else's may have a name like a run's ("mnist-2024"). So only what carries
our mark, and holds nothing but what we put there ourselves, is ever removed. A directory gets its
name when it has the mark; until then it has one that nobody else gives (".mnist-1a2b.new").
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dlctl.runs import checkpoints, database, paths

MARK = paths.UNFINISHED
_RUN_ID_END = re.compile(r"-[0-9a-f]{4}(\.new)?$")
_DATABASES = (database.FILE, f".{database.FILE}.tmp")
_FILES = (
    *(MARK, "job.toml", "job.json", "key"),
    *(name + s for name in _DATABASES for s in ("", "-journal", "-wal", "-shm")),
)
_TEMPORARY = re.compile(r"\.(job\.toml|job\.json|key)\.[0-9a-f]{8}\.tmp")
_OF_CHECKPOINT = re.compile(r".+\.safetensors|\.?manifest\.json(\.[0-9a-f]{8}\.tmp)?")
LOGS = "logs"


@contextmanager
def made(directory: Path) -> Iterator[None]:
    """Make this directory; it is marked, and ours alone to fill, before it has its name.

    Raises FileExistsError if there is one, or somebody else makes it just now, and OSError.
    """
    if os.path.lexists(directory):  # To rename would put ours in the place of one that is empty.
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(directory))
    new = directory.with_name(f".{directory.name}.new")
    new.mkdir(parents=True)
    with ExitStack() as held:
        try:
            held.enter_context(paths.held(new))
            (new / MARK).touch(exist_ok=False)
            new.rename(directory)
        except FileNotFoundError as error:  # Swept away, as it was not held yet.
            raise FileExistsError(errno.EEXIST, error.strerror, str(directory)) from error
        except OSError as error:
            with suppress(OSError):  # Who sweeps it away holds it.
                _remove_if_ours(new)
            if error.errno == errno.ENOTEMPTY:  # Somebody else has that name meanwhile.
                raise FileExistsError(errno.EEXIST, error.strerror, str(directory)) from error
            raise
        yield


def unmark(directory: Path) -> None:
    """Say that it has become a run, which is never removed unasked. Raises OSError."""
    (directory / MARK).unlink()


def sweep(parent: Path, name: str) -> None:
    """Remove directories that a killed command has begun to make and that never became runs."""
    for directory in (*parent.glob(f"{name}-????"), *parent.glob(f".{name}-????.new")):
        if directory.is_symlink() or not _RUN_ID_END.search(directory.name):
            continue
        try:
            if not _may_be_ours(directory):
                continue
            with paths.held(directory):
                _remove_if_ours(directory)
        except OSError:  # somebody makes it just now, or it cannot be removed
            continue


def _may_be_ours(directory: Path) -> bool:
    path = directory / MARK
    return (path.is_file() and not path.is_symlink()) or directory.suffix == ".new"


def _remove_if_ours(directory: Path) -> None:
    """File by file, the mark last: what somebody puts there meanwhile stays, and so does its place.

    Raises OSError if that happens.
    """
    entries = list(directory.iterdir())
    if not _may_be_ours(directory) or not all(map(_is_ours, entries)):
        return
    for entry in sorted(entries, key=lambda path: path.name == MARK):
        if entry.name == checkpoints.FOLDER:
            _remove_checkpoints(entry)
        elif entry.name == LOGS:
            entry.rmdir()
        else:
            entry.unlink()
    directory.rmdir()


def _remove_checkpoints(folder: Path) -> None:
    for checkpoint in folder.iterdir():
        for file in filter(_is_part, checkpoint.iterdir()):
            file.unlink()
        checkpoint.rmdir()
    folder.rmdir()


def _is_ours(path: Path) -> bool:
    if path.is_symlink():
        return False
    if path.name == LOGS:
        return path.is_dir() and not any(path.iterdir())
    if path.name == checkpoints.FOLDER:
        return path.is_dir() and all(map(_is_checkpoint, path.iterdir()))
    return path.is_file() and (path.name in _FILES or bool(_TEMPORARY.fullmatch(path.name)))


def _is_checkpoint(path: Path) -> bool:
    """Whether this is one that a run was to begin with, or as much of it as was copied."""
    return path.is_dir() and not path.is_symlink() and all(map(_is_part, path.iterdir()))


def _is_part(file: Path) -> bool:
    is_file = file.is_file() and not file.is_symlink()
    return is_file and bool(_OF_CHECKPOINT.fullmatch(file.name))
