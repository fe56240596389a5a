"""Run directories that are being made: how they are marked, and removed if the maker was killed.

A directory of somebody else's may have a name like a run's ("mnist-2024"). So only what carries our
mark is ever removed. A directory gets its name when it has the mark; until then it is empty and has
one that nobody else gives (".mnist-1a2b.new").
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dlctl.runs import paths

MARK = paths.UNFINISHED
_RUN_ID_END = re.compile(r"-[0-9a-f]{4}(\.new)?$")


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
        except OSError as error:
            _remove(new)
            # Swept away before it was held, or somebody else has that name meanwhile.
            if error.errno in (errno.ENOENT, errno.ENOTEMPTY):
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
        # Somebody makes it just now, or it cannot be removed.
        with suppress(OSError), paths.held(directory):
            _remove(directory)


def _remove(directory: Path) -> None:
    mark = directory / MARK
    with suppress(OSError):
        if mark.is_file() and not mark.is_symlink():
            shutil.rmtree(directory)
        elif directory.suffix == ".new":
            directory.rmdir()
