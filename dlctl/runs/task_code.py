"""The Python files of a run's task as they were when a worker of it read them first.

They are kept in the run directory, each under its full path. Whoever edits them while the run goes
on does not change what it trains: a worker that replaces another one has the same code. New code
comes in when a user says so: by `dlctl start`, `recover` or `restart`, which forget what is kept.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

CODE = "code"


def as_it_was(directory: Path, path: Path, now: bytes | None) -> bytes | None:
    """The content that a file of the task has for this run, `now` if nobody has read it so far.

    directory: of the run. path: full. now: None if there is no such file any more. Without room on
    the disk it is what it is now.
    """
    kept = _kept(directory, path)
    with suppress(OSError):
        return kept.read_bytes()
    if now is None:
        return None
    temporary = kept.with_name(f".{kept.name}.{os.getpid()}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(now)
        os.link(temporary, kept)
    except FileExistsError:  # Another worker was first.
        with suppress(OSError):
            return kept.read_bytes()
    except OSError:
        return now
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return now


def changed(directory: Path) -> list[Path]:
    """The files that are no longer what this run uses."""
    root = directory / CODE
    found = []
    for kept in sorted(root.rglob("*.py")):
        path = Path("/") / kept.relative_to(root)
        with suppress(FileNotFoundError):  # The run forgets it just now.
            if kept.read_bytes() != _content(path):
                found.append(path)
    return found


def forget(directory: Path) -> None:
    """From now on workers read the files as they are."""
    shutil.rmtree(directory / CODE, ignore_errors=True)


def _kept(directory: Path, path: Path) -> Path:
    return directory / CODE / path.relative_to("/")


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
