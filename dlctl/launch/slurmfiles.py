"""The directory through which a coordinator and the keepers on the nodes of its Slurm job speak.

It lies on a file system that all of them share. It is new for every job that is submitted, so that
nothing in it is of another one; attempts of the same job (Slurm may queue it again) are told apart
by their number. Its mode is 0700, and that of its files 0600: orders hold secret keys.

    job.sh, job.log     the script, and what it and the keepers have printed
    agent-N.order       what `daemons.node begin` is to be asked on node N-1
    agent-N.kill        the incarnation that is to be killed
    agent-N.answer      {attempt, incarnation, state, ...}: what became of it
    notice              Slurm has sent its signal
    over                the run is over: keepers end, and start nothing any more
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError
from dlctl.runs import paths

FOLDER = "slurm"
OVER = "over"
FILE_BYTES_MAX = 64 << 20
Json = dict[str, Any]


def root(given: str) -> Path:
    """Where such directories are made; `given`: `dir` in [slurm]."""
    return Path(given).expanduser() if given else paths.index_dir().parent / FOLDER


def make(directory: Path) -> None:
    """Raises DlctlError if it cannot be made, or others may go in there."""
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise DlctlError(
            f"cannot make a directory for the orders to Slurm's nodes: {error.strerror}",
            where=str(error.filename or directory),
            hint="set dir in [slurm] to a directory that this machine and all nodes share",
        ) from error
    check(directory)


def check(directory: Path) -> None:
    """Raises DlctlError unless this is a directory of ours that nobody else can enter."""
    if not paths.is_private(directory):
        words = "the directory of the orders must be yours, with mode 0700"
        raise DlctlError(words, where=str(directory))


def write(path: Path, value: Json) -> None:
    """All of it or nothing takes the place of `path`; only we can read it. Raises OSError."""
    paths.write(path, json.dumps(value).encode(), 0o600)


def read(path: Path) -> Json:
    """{} if there is none, or it is no JSON object, or somebody else has put it there."""
    with suppress(OSError, ValueError, RecursionError):
        with open(path, "rb", opener=_open_no_link) as file:
            info = os.fstat(file.fileno())
            if info.st_uid != os.getuid() or not stat.S_ISREG(info.st_mode):
                return {}
            data = file.read(FILE_BYTES_MAX)
        value = json.loads(data)
        if type(value) is dict:
            return value
    return {}


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def order(directory: Path, agent: str) -> Path:
    return directory / f"{agent}.order"


def kill(directory: Path, agent: str) -> Path:
    return directory / f"{agent}.kill"


def answer(directory: Path, agent: str) -> Path:
    return directory / f"{agent}.answer"


def last_error(path: Path) -> str:
    """Of what the job has printed, the last line that names an error; "" if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    errors = [line.strip() for line in text.splitlines() if "error" in line.lower()]
    causes = [line for line in errors if "Exited with" not in line]
    return (causes or errors or [""])[-1][:300]
