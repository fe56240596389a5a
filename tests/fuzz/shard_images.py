"""The reader of mapped states: a damaged or foreign one is refused, and a good one goes on.

An input is the size of the file and then its pieces that are not zero, each behind its place. Most
cases change what a checksum covers and put the checksum right: as another version of dlctl would
have written it, or a fault in this one.
"""

from __future__ import annotations

import struct
import zlib
from contextlib import suppress
from random import Random

import numpy as np

from dlctl.shards import image
from dlctl.shards.base import Shard
from dlctl.shards.errors import Diverged, Unusable
from dlctl.shards.image import ImageForm
from dlctl.shards.mapped import Mapped

from . import mutation, shard_model
from .parts import join, split
from .shard_model import (
    BOOT,
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

NAME = "image"
MEMORY_BYTES = shard_model.MEMORY_BYTES
MEMORY_PER_BYTE = 100
FORM = ImageForm.of(SPEC, BOOT)
SIZE_MAX_BYTES = 2**20
_PIECE_BYTES = 256
_PLACE_BYTES = 4


# ---------------------------------------------------------------- what is tried


def seeds() -> list[bytes]:
    """States after dense and sparse updates, closed in order and not."""
    kinds = [(), (dense(),), (dense(), sparse()), (sparse(), sparse(), dense())]
    return [join(_pieces(_made(*deltas, close=close))) for deltas in kinds for close in (0, 1)]


def _made(*deltas: object, close: int) -> bytearray:
    buffer = bytearray(FORM.total_bytes)
    shard = Shard(adam(), Mapped.create(buffer, SPEC, BOOT))
    begin(shard)
    train(shard, *deltas)  # type: ignore[arg-type]
    if close:
        shard.storage.close()
    return buffer


def _pieces(buffer: bytearray) -> list[bytes]:
    """The parts of an input."""
    data = bytes(buffer)
    pieces = [len(data).to_bytes(_PLACE_BYTES, "little")]
    for at in range(0, len(data), _PIECE_BYTES):
        content = data[at : at + _PIECE_BYTES].rstrip(b"\0")
        if content:
            pieces.append(at.to_bytes(_PLACE_BYTES, "little") + content)
    return pieces


def _built(data: bytes) -> bytearray:
    """The file that an input describes."""
    size, *pieces = split(data) or [b""]
    buffer = bytearray(min(int.from_bytes(size, "little"), SIZE_MAX_BYTES))
    for piece in pieces:
        at, content = int.from_bytes(piece[:_PLACE_BYTES], "little"), piece[_PLACE_BYTES:]
        if at + len(content) <= len(buffer):
            buffer[at : at + len(content)] = content
    return buffer


def mutate(random: Random, data: bytes, other: bytes) -> bytes:
    if random.random() < 0.2:
        return mutation.mutate(random, data, other, [])
    buffer, another = _built(data), _built(other)
    with suppress(ValueError, TypeError, struct.error, ArithmeticError, IndexError, RecursionError):
        for _ in range(mutation.few(random)):
            random.choice(_CHANGES)(random, buffer, another)
    return join(_pieces(buffer))


def _change_header(random: Random, buffer: bytearray, another: bytearray) -> None:
    head = image._HEADER
    bodies = []
    for source in (buffer, another):
        length = head.unpack_from(source)[2]
        bodies.append(bytes(source[head.size : head.size + length]))
    body = change_body(random, *bodies)
    packed = head.pack(image.MAGIC, zlib.crc32(body), len(body)) + body
    buffer[: len(packed)] = packed


def _change_commit(random: Random, buffer: bytearray, another: bytearray) -> None:
    """Fields or body of one of the two commits; its CRC is right."""
    at, head = FORM.commit_at(random.randrange(2)), image._COMMIT
    _, length, *fields = head.unpack_from(buffer, at)
    body = bytes(buffer[at + head.size : at + head.size + length])
    if random.random() < 0.5:
        body = change_body(random, body, body)
    else:
        which = random.randrange(len(fields))
        limit = 2**8 if which == 1 else 2**64
        fields[which] = random.choice((0, 1, 2, 4, fields[which] + 1, 2**31, limit - 1)) % limit
    packed = head.pack(0, len(body), *fields)[4:] + body
    buffer[at : at + 4 + len(packed)] = struct.pack("<I", zlib.crc32(packed)) + packed


def _change_undo(random: Random, buffer: bytearray, another: bytearray) -> None:
    """An undo record with the right sums, of elements that may not be there."""
    undo = FORM.undo(buffer)
    commits = [image.read_commit(buffer, FORM, which) for which in (0, 1)]
    newest = max((commit.number for commit in commits if commit is not None), default=0)
    undo.begin(newest + random.choice((0, 1, 1, 1, 2)))
    count = random.randint(1, FORM.undo_max)
    undo.indices[:count] = random.choices((0, 1, SIZE - 1, SIZE, 2**32 - 1), k=count)
    undo.mark(0, count)


def _change_vector(random: Random, buffer: bytearray, another: bytearray) -> None:
    vectors = FORM.vectors(buffer, random.randrange(2))
    values = vectors[random.choice(sorted(vectors))]
    values[random.randrange(values.size)] = random.choice((0, 1e38, -1e-45, np.inf, np.nan))


def _change_mark(random: Random, buffer: bytearray, another: bytearray) -> None:
    mark = image.done_mark(buffer)
    mark[random.randrange(2)] = random.choice((0, 1, int(mark[0]) + 1, 2**64 - 1))


def _change_bytes(random: Random, buffer: bytearray, another: bytearray) -> None:
    at = random.randrange(len(buffer))
    buffer[at : at + 8] = random.randbytes(8)


def _change_size(random: Random, buffer: bytearray, another: bytearray) -> None:
    if random.random() < 0.2:
        del buffer[random.randrange(len(buffer)) :]


_CHANGES = (
    _change_header, _change_commit, _change_commit, _change_commit, _change_undo, _change_vector,
    _change_mark, _change_bytes, _change_size,
)  # fmt: skip


# ---------------------------------------------------------------- what must hold


def target(data: bytes) -> None:
    """Unusable and nothing else; what is opened can be worked on, closed and opened again."""
    buffer = _built(data)
    known = image.has_updates(bytes(buffer), SPEC, BOOT)
    assert type(known) is bool
    try:
        shard = Shard(adam(), Mapped.reopen(buffer, SPEC, BOOT))
        meta = shard.resume()
    except Unusable:
        return
    check_opened(shard, meta)
    try:
        train(shard, dense(), sparse())
    except Diverged:  # Of values near the largest float: then it is in no commit.
        Mapped.reopen(buffer, SPEC, BOOT)
        return
    shard.storage.close()
    again = Shard(adam(), Mapped.reopen(buffer, SPEC, BOOT))
    assert again.resume() == {"initialised": True, "deliveries": [[0, 1, 2]]}
    assert snapshot(again) == snapshot(shard)
    assert image.has_updates(bytes(buffer), SPEC, BOOT)
