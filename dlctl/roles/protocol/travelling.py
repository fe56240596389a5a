"""Files on their way between hosts: what the roles want done with them, and what comes back.

Names of files are relative to the run directory, or to the directory that stands for it on another
host, and always have slashes: "ckpt/000000000120-3/shard-0.safetensors", "logs/worker-0.3.jsonl".
"""

from __future__ import annotations

from dataclasses import dataclass

from dlctl.machine import Effect, Event, Peer
from dlctl.messages import FileData, ReadFile

CHECKPOINTS, LOGS, ACKS = "ckpt", "logs", "acks"
"""Folders of a run directory."""
BYTES_MAX = 1 << 20
"""In one answer."""
NOT_THERE = "there is no such file"
"""The error of an answer that says so."""


def checkpoint_file(directory: str, file: str) -> str:
    """The name of a file in a checkpoint directory, wherever the run directory is."""
    return f"{CHECKPOINTS}/{directory.rstrip('/').rpartition('/')[2]}/{file}"


def saved_file(name: str) -> str:
    """What a server or worker calls its file of a checkpoint: no two have the same one."""
    role, _, index = name.partition("-")
    return f"shard-{index}.safetensors" if role == "server" else f"{name}.safetensors"


class RequestNumbers:
    """Of the questions of one process. They begin with the clock: a process before this one may
    have asked for the same, and its answers must not be taken for ours.
    """

    def __init__(self) -> None:
        self._newest = 0

    def next(self, now: float) -> int:
        self._newest = self._newest + 1 if self._newest else int(now * 1000) + 1
        return self._newest


# ---------------------------------------------------------------- who has a file


@dataclass(frozen=True, slots=True)
class ReadBytes(Effect):
    """Answer this question of `peer`; answered by `BytesRead`."""

    peer: Peer
    question: ReadFile


@dataclass(frozen=True, slots=True)
class BytesRead(Event):
    peer: Peer
    answer: FileData


@dataclass(frozen=True, slots=True)
class RemoveCopy(Effect):
    """Remove a file of a checkpoint from this host."""

    file: str


# ---------------------------------------------------------------- who wants one, whole


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file that is to come."""

    file: str
    nbytes: int | None = None
    """None: as many as there are."""
    sha256: str = ""
    """"": its own content says whether it is right."""


@dataclass(frozen=True, slots=True)
class TakeBytes(Effect):
    """Put `data` at `offset` of a file that is not there yet, beside its place."""

    file: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class SealFile(Effect):
    """All bytes have come: check them, and put the file durably in its place; answered by
    `FileSealed`.
    """

    file: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckFile(Effect):
    """See whether a file that is in its place has this size and checksum; answered by
    `FileSealed`.
    """

    file: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class DiscardFile(Effect):
    """Nothing comes of a file: remove what was taken of it."""

    file: str


@dataclass(frozen=True, slots=True)
class FileSealed(Event):
    """A file is in its place and right, or not; then also an answer to `TakeBytes`."""

    file: str
    error: str
    """"" if all went well."""


@dataclass(frozen=True, slots=True)
class StillReading(Event):
    """Files are checked and sealed one after the other, and that takes long: more of one has been
    read since this was said last.
    """


@dataclass(frozen=True, slots=True)
class FilesMissing(Event):
    """Answer to `LoadArrays` on another host: these have to be fetched before it can be done."""

    files: tuple[Wanted, ...]


# ---------------------------------------------------------------- who mirrors some as they grow


@dataclass(frozen=True, slots=True)
class TakeLog(Effect):
    """Write these bytes at `offset` of a log."""

    file: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class RotateLog(Effect):
    """The log goes on in a new file, as at its origin: the present one is renamed."""

    file: str


@dataclass(frozen=True, slots=True)
class ReplaceFile(Effect):
    """Have `data`, and nothing else, in a small file."""

    file: str
    data: bytes


@dataclass(frozen=True, slots=True)
class MirrorFailed(Event):
    """What was to be taken of a log could not be written: from `offset` on it has to come again."""

    file: str
    offset: int
    error: str
