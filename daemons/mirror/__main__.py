"""Mirrors a run: `python -m daemons.mirror RUN_DIRECTORY COORDINATOR_PID`."""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from daemons.mirror.uploader import FOLDER, Uploader, why
from daemons.process import read_job
from dlctl.runs import paths
from dlctl.stores import addresses, checkpoint_store, ownership
from dlctl.stores.objects import StoreError
from dlctl.util import regular
from dlctl.util.flock import is_locked_within
from dlctl.util.names import RUN_IN_ADDRESS
from dlctl.util.redact import redacted

LOCK = "lock"
PREDECESSOR_S = 30.0
"""Time for the process before to end: it does so with its coordinator."""
LOOK_S = 0.2
NICENESS = 10
"""Training comes first."""
PIECE_BYTES = 1 << 16
ERROR_CHARS_MAX = 500


def main(directory: Path, coordinator: int) -> int:
    asked, told = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # What a package prints is no answer.
    threading.Thread(target=_end_with, args=(coordinator,), daemon=True).start()
    os.nice(NICENESS)

    def say(**facts: Any) -> None:
        with suppress(OSError):  # The coordinator is gone: there is nobody to tell.
            os.write(told, json.dumps(facts).encode() + b"\n")

    try:
        with _alone(directory):
            uploader = _uploader(directory)
            say(begun=True, mirrored=uploader.begin())
            for numbers in _rows(asked):
                mirrored = uploader.bring(lambda sent, nbytes: say(sent=sent, nbytes=nbytes))
                say(number=max(numbers), mirrored=mirrored)
    except Exception as error:  # Libraries raise anything.
        text, cause = why(error)
        say(error=" ".join(redacted(text).split())[:ERROR_CHARS_MAX], cause=cause)
        return 1
    return 0


def _uploader(directory: Path) -> Uploader:
    job = read_job(directory)
    address = job.checkpoints.mirror.replace(RUN_IN_ADDRESS, directory.name)
    claim = ownership.kept(directory, address)
    ownership.write(directory, claim)
    store = checkpoint_store.at(addresses.parse(address))
    return Uploader(directory, job, store, claim)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Exclusive use of the mirror. Raises StoreError if another process has it."""
    folder = directory / FOLDER
    folder.mkdir(mode=paths.PRIVATE, exist_ok=True)
    lock = regular.descriptor(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not is_locked_within(PREDECESSOR_S, lock):
            raise StoreError("the process before it does not end", "other", where=str(folder))
        yield
    finally:
        os.close(lock)


def _rows(asked: int) -> Iterator[list[int]]:
    """The numbers of rows that have come, all that are there at a time."""
    rest, numbers = b"", list[int]()
    while piece := os.read(asked, PIECE_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        numbers += [json.loads(line)["number"] for line in lines]
        if numbers and not select.select([asked], [], [], 0.0)[0]:
            yield numbers
            numbers = []


def _end_with(coordinator: int) -> None:
    """End this process with its coordinator: the next one starts another."""
    never = threading.Event()
    while os.getppid() == coordinator:
        never.wait(LOOK_S)
    os._exit(1)


code = main(Path(sys.argv[1]), int(sys.argv[2]))
os._exit(code)
