"""The Python files of a run's task, as they were when a worker first read them.

They are stored in the run directory, each under its full path. An edit during the run does not
change what it trains: a worker that replaces another one has the same code. New code is loaded on
request only: by `dlctl start`, `recover` or `restart`, which discard the stored files.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from dlctl.util import regular

CODE = "code"


def as_it_was(directory: Path, path: Path, now: bytes | None) -> bytes | None:
    """The content of a task's file for this run; `now` if no worker has read it so far.

    directory: of the run. path: full. now: the current content; None if the file no longer exists.
    On a full disk, returns `now`.
    """
    kept = directory / CODE / path.relative_to("/")
    with suppress(OSError):
        return regular.read_bytes(kept)
    if now is None:
        return None
    temporary = kept.with_name(f".{kept.name}.{os.getpid()}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # Left by an earlier process.
        with temporary.open("xb") as file:
            file.write(now)
        os.link(temporary, kept)
    except FileExistsError:  # Another worker was first.
        with suppress(OSError):
            return regular.read_bytes(kept)
    except OSError:
        return now
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return now


def changed(directory: Path) -> list[Path]:
    """The files that differ from those that this run uses."""
    root = directory / CODE
    found = []
    for kept in sorted(root.rglob("*.py")):
        path = Path("/") / kept.relative_to(root)
        now = None
        with suppress(OSError):
            now = regular.read_bytes(path)
        with suppress(OSError):  # `forget` has just removed it, or it is no file.
            if regular.read_bytes(kept) != now:
                found.append(path)
    return found


def forget(directory: Path) -> None:
    """Make workers read the current files from now on."""
    shutil.rmtree(directory / CODE, ignore_errors=True)
