"""The directory through which a coordinator and the keepers on the nodes of its Slurm job
communicate.

It lies on a shared file system. Every submitted job gets a new directory, so it contains no files
of another job. Attempts of the same job (Slurm may requeue it) are distinguished by their number.
Its mode is 0700, and that of its files 0600: orders hold secret keys.

    job.sh, job.log     the script, and the output of it and of the keepers
    agent-N.order       the request to `daemons.node begin` on node N-1
    agent-N.kill        the incarnation to kill
    agent-N.answer      {attempt, incarnation, state, ...}: the result
    notice              Slurm has sent its signal
    over                the run is over: keepers exit, and start nothing any more
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError, os_errors_as
from dlctl.runs import paths
from dlctl.util import regular

FOLDER = "slurm"
OVER = "over"
FILE_BYTES_MAX = 64 << 20
Json = dict[str, Any]


def root(given: str) -> Path:
    """The parent of these directories; `given`: `dir` in [slurm]."""
    return Path(given).expanduser() if given else paths.index_dir().parent / FOLDER


def make(directory: Path) -> None:
    """Raises DlctlError if it cannot be created, or other users can enter it."""
    what = "cannot create a directory for the orders to Slurm's nodes"
    hint = "set dir in [slurm] to a directory that this machine and all nodes share"
    with os_errors_as(what, directory, hint):
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
    check(directory)


def check(directory: Path) -> None:
    """Raises DlctlError unless this user owns the directory and no other user can enter it."""
    if not paths.is_private(directory):
        words = "the directory of the orders must be yours, with mode 0700"
        raise DlctlError(words, where=str(directory))


def write(path: Path, value: Json) -> None:
    """Replace `path` atomically; only this user can read it. Raises OSError."""
    paths.write(path, json.dumps(value).encode(), 0o600)


def read(path: Path) -> Json:
    """{} if the file is missing, is not a JSON object, or belongs to another user."""
    with suppress(OSError, ValueError, RecursionError):
        with regular.opened(path, os.O_NOFOLLOW) as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return {}
            data = file.read(FILE_BYTES_MAX)
        value = json.loads(data)
        if type(value) is dict:
            return value
    return {}


def order(directory: Path, agent: str) -> Path:
    return directory / f"{agent}.order"


def kill(directory: Path, agent: str) -> Path:
    return directory / f"{agent}.kill"


def answer(directory: Path, agent: str) -> Path:
    return directory / f"{agent}.answer"


def last_error(path: Path) -> str:
    """The last line of the job's output that names an error; "" if there is none."""
    try:
        with regular.opened(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    errors = [line.strip() for line in text.splitlines() if "error" in line.lower()]
    causes = [line for line in errors if "Exited with" not in line]
    return (causes or errors or [""])[-1][:300]
