"""What somebody has found wrong with a checkpoint when he read all of it, for those who only look.

    <checkpoint>/damaged.json    what was found, and how the files were then

To read every byte of a large checkpoint takes long, and only who goes on from one has to. A note
counts for as long as the files are what they were: one that was brought back is a new file.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlctl.runs import paths

NOTE = "damaged.json"
MODE = 0o644
Stamp = dict[str, list[int]]


def stamp(directory: Path) -> Stamp:
    """Size in bytes and time of the last change of every file; nobody can set that time back."""
    found: Stamp = {}
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name != NOTE and not entry.name.startswith("."):
                info = entry.stat(follow_symlinks=False)
                found[entry.name] = [info.st_size, info.st_ctime_ns]
    return found


def note(directory: Path, before: Stamp, problems: list[str]) -> None:
    """Keep what was found, or that nothing is wrong any more; `before`: the stamp before that.

    Where nothing can be written nobody is told: the note saves time, and nothing depends on it.
    """
    path = directory / NOTE
    with suppress(OSError):
        if not problems:
            path.unlink(missing_ok=True)
            return
        told = [problem.removeprefix(f"{directory}/") for problem in problems]
        data = json.dumps({"files": before, "problems": told})
        if not path.is_file() or path.read_text() != data:
            paths.write(path, data.encode(), MODE)


def noted(directory: Path) -> list[str]:
    """What is known to be wrong with a checkpoint, a sentence each; [] if nothing is."""
    try:
        data: Any = json.loads((directory / NOTE).read_bytes())
        if data["files"] != stamp(directory):
            return []
        return [f"{directory}/{problem}" for problem in data["problems"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
