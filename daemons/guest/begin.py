"""Prepares this machine for a worker that joins, and becomes its guest process.

    python -m daemons.guest.begin INVITATION ADDRESS PROGRAM...

PROGRAM: what follows `python` in the command of the user. The guest process has the command line of
a daemon, by which its worker finds it (`daemons.parent_watch`), so this one replaces itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from daemons.guest import torchrun
from daemons.guest.knock import knock
from daemons.node.requests import FOLDER, make
from daemons.process import in_words
from dlctl.control import invitation
from dlctl.errors import DlctlError, UsageError
from dlctl.launch.base import HOST_FILE
from dlctl.runs import paths
from dlctl.util import regular

JOIN_FILE = "join.json"
"""What the guest process needs to know: the invitation, and the user's program."""


def program_of(words: list[str], here: Path) -> dict[str, Any]:
    """The keys of `Job` that say what is run, from a command without its first word. here: where it
    was given. Raises UsageError.
    """
    match words:
        case ["-m", module, *args]:
            path = here.joinpath(*module.split("."))
            found = [path.with_suffix(".py"), path / "__main__.py"]
        case [script, *args] if not script.startswith("-"):
            module, found = "", [here / script]
        case _:
            what = "after --, write the command that trains: python train.py, or python -m NAME"
            raise UsageError(what)
    if not (files := [file for file in found if file.is_file()]):
        raise UsageError("there is no such program", where=str(found[0]))
    return {"script": str(files[0]), "module": module, "args": args}


def address_of(text: str) -> str:
    """tcp://HOST:PORT. Raises UsageError."""
    text = text if "://" in text else f"tcp://{text}"
    try:
        parts = urlsplit(text)
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            return text
    except ValueError:
        pass
    raise UsageError(f'"{text:.200}" is not an address of a run: HOST:PORT')


def incarnation_after(directory: Path) -> int:
    """A number that no earlier process of this guest had, here or on another machine: milliseconds
    since 1970, unless the clock was set back.
    """
    before = 0
    with suppress(OSError, ValueError, KeyError, TypeError):
        before = int(json.loads(regular.read_bytes(directory / JOIN_FILE))["incarnation"])
    return max(time.time_ns() // 1_000_000, before + 1)


def begin(file: Path, address: str, words: list[str]) -> list[str]:
    """Check all that can be checked here, and write the directory of this worker. Returns the
    command line of the guest process.
    """
    made = invitation.load(file)
    processes, words = torchrun.taken_apart(words)
    program = program_of(words, Path.cwd())
    control = address_of(address or made.address)
    knock(made, control)
    directory = paths.index_dir().parent / FOLDER / made.guest / made.run
    make(directory)
    incarnation = incarnation_after(directory)
    join = {
        "invitation": str(file.absolute()),
        "program": program,
        "processes": processes,
        "incarnation": incarnation,
    }
    paths.write(directory / JOIN_FILE, json.dumps(join, indent=1).encode(), 0o600)
    paths.write(directory / HOST_FILE, json.dumps({"agent": made.guest}).encode(), 0o600)
    module = ["-P", "-m", "daemons.guest"]
    return [sys.executable, *module, str(directory), made.guest, str(incarnation), control]


def main() -> None:
    file, address, *words = sys.argv[1:]
    try:
        command = begin(Path(file), address, words)
    except DlctlError as error:
        print(f"error: {in_words(error)}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.stdout.flush()
    os.execv(command[0], command)  # noqa: S606  (no shell is meant)


if __name__ == "__main__":
    main()
