"""The control plane: files of other hosts, piece by piece."""

from __future__ import annotations

from dlctl.util.record import record
from dlctl.wire.messages.base import Message


@record
class ReadFile(Message):
    """To an agent, or to the coordinator from a daemon on another host: request `nbytes` bytes of a
    file. Repeated until `FileData`; idempotent.
    """

    request: int
    file: str
    """Relative to the receiver's directory: "ckpt/000000000120-3/shard-0.safetensors"."""
    part: int
    """The part of a rotated log that `offset` is in; 0: none yet."""
    offset: int
    nbytes: int


@record
class FileData(Message):
    """Answer to `ReadFile`, with fewer bytes than requested if the file ends before."""

    name: str
    """The sender."""
    request: int
    file: str
    part: int
    """The newest part, which these bytes are of: from its beginning, if another was requested."""
    offset: int
    size: int
    """The current size of the file, or of this part of it."""
    data: bytes
    error: str


@record
class FileTaken(Message):
    """To an agent: this file of a checkpoint is at its destination; remove the copy."""

    file: str


@record
class KeepFrozen(Message):
    """To the first worker that has built the model: write your frozen parameters to this file."""

    file: str


@record
class FrozenKept(Message):
    """The file is on the disk of the worker's host, or it is not (`error`)."""

    name: str
    file: str
    sha256: str
    nbytes: int
    error: str
