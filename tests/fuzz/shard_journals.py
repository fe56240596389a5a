"""The reader of journals: it goes as far as the records are whole, or says where they are not.

An input is a base and its journal, as they lie on the disk. Most cases change the content of a
record and put its checksums right.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import numpy as np

from daemons.server.disklog import DiskLog
from dlctl.shards import journal_format
from dlctl.shards.base import Shard, no_point
from dlctl.shards.errors import Diverged, Unusable
from dlctl.shards.journaled import Journaled

from . import mutation, shard_model
from .parts import join, split
from .scratch import scratch
from .shard_model import (
    SIZE,
    SPEC,
    adam,
    begin,
    change_body,
    check_opened,
    dense,
    snapshot,
    sparse,
    train,
)

NAME = "journal"
MEMORY_BYTES = shard_model.MEMORY_BYTES
MEMORY_PER_BYTE = 200
NUMBER = 1
"""Of the base, in the names of its files."""
_TOKENS = [
    journal_format.MAGIC,
    b"\0" * 24,
    b"\xff" * 8,
    msgpack.packb({"state": {}, "updates": []}),
]


# ---------------------------------------------------------------- what is tried


def seeds() -> list[bytes]:
    """Logs after dense and sparse updates, closed in order and not."""
    kinds = [(), (dense(),), (dense(), sparse()), (sparse(), sparse(), dense(), sparse())]
    return [_seed(*deltas, close=close) for deltas in kinds for close in (0, 1)]


def _seed(*deltas: Any, close: int) -> bytes:
    log = DiskLog([scratch("seed") / "state"], no_point)
    log.open(SPEC)
    shard = Shard(adam(), Journaled.create(log, SPEC))
    begin(shard)
    train(shard, *deltas)
    if close:
        shard.storage.close()
    assert log.bases() == [NUMBER]
    data = join([log.read_base(NUMBER), b"".join(log.read_journal(NUMBER))])
    log.close()
    return data


def mutate(random: Random, data: bytes, other: bytes) -> bytes:
    files, others = (*split(data), b"", b"")[:2], (*split(other), b"", b"")[:2]
    choice = random.randrange(10)
    if choice < 8:
        with suppress(ValueError, TypeError, RecursionError, OverflowError, Unusable):
            at = random.randrange(2)
            changed = _change_record(random, files[at], others[at])
            return join([changed, files[1]] if at == 0 else [files[0], changed])
    if choice == 8:
        return mutation.mutate(random, data, other, _TOKENS)
    at = random.randrange(2)
    changed = mutation.mutate(random, files[at], others[at], _TOKENS)
    return join([changed, files[1]] if at == 0 else [files[0], changed])


def _change_record(random: Random, data: bytes, other: bytes) -> bytes:
    """One record of a file with another number, body or arrays; repeated, removed or moved."""
    found = [
        (r.number, msgpack.packb(r.body), bytes(r.data)) for r in journal_format.read_each([data])
    ]
    if not found:
        return data
    at = random.randrange(len(found))
    number, body, arrays = found[at]
    choice = random.randrange(8)
    if choice < 4:
        found[at] = number, change_body(random, body, body), arrays
    elif choice == 4:
        found[at] = random.choice((0, number + 1, number - 1, 2**64 - 1)) % 2**64, body, arrays
    elif choice == 5:
        found[at] = number, body, _change_arrays(random, arrays)
    elif choice == 6:
        found.insert(at, random.choice(found))
    else:
        del found[at]
    return b"".join(_packed(*record) for record in found)


def _change_arrays(random: Random, data: bytes) -> bytes:
    if random.random() < 0.5 or len(data) < 8:
        return mutation.mutate(random, data, data, [])
    at = random.randrange(0, len(data) - 7, 4)
    new = random.choice((np.float32(np.nan), np.float32(1e38), np.int64(-1), np.int64(SIZE)))
    return data[:at] + new.tobytes() + data[at + new.nbytes :]


def _packed(number: int, body: bytes, arrays: bytes) -> bytes:
    """A record with the right checksums around any body."""
    crc = journal_format.zlib.crc32(body + arrays)
    return journal_format._head(crc, number, len(body), len(arrays)) + body + arrays


# ---------------------------------------------------------------- what must hold


@cache
def _directory() -> Path:
    return scratch("journals") / "state"


def target(data: bytes) -> None:
    """Unusable and nothing else; what is opened can be worked on, closed and opened again."""
    shutil.rmtree(_directory(), ignore_errors=True)
    _directory().mkdir(mode=0o700)
    base, journal = (*split(data), b"", b"")[:2]
    for kind, content in (("base", base), ("journal", journal)):
        (_directory() / f"shard-{SPEC.shard}.{kind}-{NUMBER:012d}").write_bytes(content)
    log = DiskLog([_directory()], no_point)
    log.open(SPEC)
    try:
        with np.errstate(all="ignore"):
            _go_on(log)
    finally:
        log.close()


def _go_on(log: DiskLog) -> None:
    assert type(Journaled(log, SPEC)._has_updates()) is bool
    shard = Shard(adam(), Journaled(log, SPEC))
    try:
        meta = shard.resume()
    except Unusable:
        return
    check_opened(shard, meta)
    try:
        train(shard, dense(), sparse())
    except Diverged:  # Of values near the largest float: then it is in no commit.
        Shard(adam(), Journaled(log, SPEC)).resume()
        return
    shard.storage.close()
    again = Shard(adam(), Journaled(log, SPEC))
    assert again.resume() == {"initialised": True, "deliveries": [[0, 1, 2]]}
    assert snapshot(again) == snapshot(shard)
