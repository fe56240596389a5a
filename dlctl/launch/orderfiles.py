"""The directory through which a coordinator and the keepers (`daemons.node.keep`) on the hosts of a
batch system communicate: nobody can log in there.

It lies on a shared file system. Every job of the batch system gets a new directory, so it contains
no files of another job. Attempts of the same job, which may be requeued, are distinguished by their
number. Its mode is 0700, and that of its files 0600: orders hold secret keys.

    agent-N.order       the request to `daemons.node begin` on the host of that agent
    agent-N.kill        the incarnation to kill; orders up to it are cancelled, seen or not
    agent-N.answer      {attempt, incarnation, state, ...}: the result
    over                the run is over: keepers exit, and start nothing any more

and what the launcher puts there besides.
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

OVER = "over"
FILE_BYTES_MAX = 64 << 20
Json = dict[str, Any]


def make(directory: Path, hint: str) -> None:
    """Create a directory of orders. Raises DlctlError, with this hint, if it cannot be created or
    other users can enter it.
    """
    with os_errors_as("cannot create a directory for the orders to the hosts", directory, hint):
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
