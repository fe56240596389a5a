"""A worker's record of acknowledged pushes: `<run>/acks/worker-0.3`, a file per incarnation.

    bytes 0..7    "DLACKS1\\n"
          8..15   uint64, term of the worker's slot
          16..23  uint64, number of shards
          24..    uint64 per shard: pushes that were settled without a gap

All numbers are little-endian. A push is (slot, term, shard, seq); a count of 5 means that the
pushes 0..4 of this term are settled on that shard. The file is mapped into the worker's memory, so
it survives a crash of the process, with every ack that the worker had handled. It has no checksum:
a count is one machine word, which is written atomically.

Reading it needs neither numpy nor torch. `daemons/worker/ack_record.py` writes it.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

from dlctl.errors import DlctlError, os_errors_as
from dlctl.util import regular

FOLDER = "acks"
MAGIC = b"DLACKS1\n"
HEADER = struct.Struct("<8sQQ")
COUNT_BYTES = 8
SHARDS_MAX = 4096
_NAME = re.compile(r"worker-(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class AckRecord:
    """The record of one incarnation of a worker."""

    slot: int
    incarnation: int
    term: int
    counts: tuple[int, ...]
    """Shard -> pushes settled without a gap; the next one has this number."""


def path_of(run_directory: Path, name: str, incarnation: int) -> Path:
    return run_directory / FOLDER / f"{name}.{incarnation}"


def blank(term: int, shards: int) -> bytes:
    """A file in which nothing is settled yet."""
    return HEADER.pack(MAGIC, term, shards) + bytes(COUNT_BYTES * shards)


def read(path: Path) -> AckRecord:
    """One file, also while its worker writes to it. Raises DlctlError for an invalid one."""
    name = _NAME.fullmatch(path.name)
    with os_errors_as("cannot read it", path):
        data = regular.read_bytes(path)
    if name and data.startswith(MAGIC) and len(data) >= HEADER.size:
        _, term, shards = HEADER.unpack_from(data)
        if shards <= SHARDS_MAX and len(data) == HEADER.size + COUNT_BYTES * shards:
            counts = struct.unpack_from(f"<{shards}Q", data, HEADER.size)
            return AckRecord(int(name[1]), int(name[2]), term, counts)
    # A disk error or a power loss may have left less than was written.
    raise DlctlError(
        "this is not a record of a worker's acks",
        where=str(path),
        hint=f"that worker's acks are unknown; move {path.name} away to check the others",
    )


def read_all(run_directory: Path) -> list[AckRecord]:
    """The records of every incarnation that had a push settled, by slot and incarnation.

    Raises DlctlError if one cannot be read: its acks are then unknown.
    """
    folder = run_directory / FOLDER
    if not folder.is_dir():
        return []
    found = [read(path) for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda record: (record.slot, record.incarnation))
