"""The directory through which a coordinator and the keepers on the nodes of its Slurm job speak.

It lies on a file system that all of them share. It is new for every job that is submitted, so that
nothing in it is of another one; attempts of the same job (Slurm may queue it again) are told apart
by their number. Its mode is 0700, and that of its files 0600: orders hold secret keys.

    job.sh, job.log     the script, and what it and the keepers have printed
    agent-N.order       what `daemons.host begin` is to be asked on node N-1
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

from dlctl import runs
from dlctl.errors import DlctlError

FOLDER = "slurm"
OVER = "over"
FILE_BYTES_MAX = 64 << 20
Json = dict[str, Any]


def root(given: str) -> Path:
    """Where such directories are made; `given`: `dir` in [slurm]."""
    return Path(given).expanduser() if given else runs.index_dir().parent / FOLDER


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
    info = directory.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        words = "the directory of the orders must be yours, with mode 0700"
        raise DlctlError(words, where=str(directory))


def write(path: Path, value: Json) -> None:
    """All of it or nothing takes the place of `path`; only we can read it. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> Json:
    """{} if there is none, or it is no JSON object, or somebody else has put it there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return {}
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if info.st_uid != os.getuid() or not stat.S_ISREG(info.st_mode):
            return {}
        data = file.read(FILE_BYTES_MAX)
    with suppress(ValueError, RecursionError):
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
