"""The bytes of a mapped state.

    header        4096 bytes, written once: identity and sizes of the state; from byte 3072 on,
                  the number of the last completely written commit, twice
    commit 0, 1   written in turn; the valid one with the higher number is the state
    undo          old values of the elements that a sparse update touches, until it is committed
    extras        averaged float64
    buffer A, B   each: "w", then the slots, of n elements, then what is kept beside matrices; a
                  commit names the active one

Checksums: CRC-32 of header, commits and extras; sums of the 64-bit words of the undo record (as
fast as the memory; a CRC would cost a third of the update). The buffers have a CRC-32 only in a
state that was closed properly; after a kill, a flipped bit in a buffer is detected only if it made
a value NaN or infinite. A commit truncated by a kill is ignored, and the one before it is valid; a
commit that was written completely but is damaged makes the state unusable.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgpack
import numpy as np

from dlctl.errors import DlctlError
from dlctl.model.vector import all_finite
from dlctl.shards.base import KEPT, Spec, W
from dlctl.shards.errors import Unusable
from dlctl.shards.journal_format import read_body
from dlctl.shards.undo import Undo
from dlctl.util.threads import PLACES
from dlctl.wire.messages import Array, Json

FORMAT = 7
MAGIC = b"dlctlSHD"
PAGE = 4096
DONE_AT = 3072
COMMIT_BYTES_MIN = 16 * 1024
COMMIT_BYTES_PER_WORKER = 64
"""The state of a slot takes at most 62 bytes while its numbers are below 2^32."""
COMMIT_BYTES_PER_NUMBER = 9
"""A float64 in msgpack."""
UNDO_PART = 16
"""A delta of more than 1/16 of the shard is written to the other buffer instead: about as fast from
that size on, and the undo record stays small."""
BUFFERS = 2
_HEADER = struct.Struct("<8sII")
"""Magic, CRC-32 of the body, its length; the body is msgpack."""
_COMMIT = struct.Struct("<IIQB7x")
"""CRC-32 of what follows, bytes of the body, number, buffer."""
_CRC_BYTES = 4


@dataclass(frozen=True, slots=True)
class ImageForm:
    """Identity and layout of a state."""

    run_id: str
    shard: int
    lo: int
    hi: int
    slots: list[str]
    averaged: int
    commit_bytes: int
    boot_id: str
    """The id of the boot in which the state was created: before a power loss the kernel may have
    written some pages and not others.
    """
    table: str = ""
    dtype: str = "float32"
    kept: dict[str, int] = dataclasses.field(default_factory=dict)
    """Name -> elements of what the optimiser keeps beside matrices."""

    @staticmethod
    def of(spec: Spec, boot_id: str) -> ImageForm:
        commit_bytes = COMMIT_BYTES_MIN + COMMIT_BYTES_PER_WORKER * spec.workers
        commit_bytes += COMMIT_BYTES_PER_NUMBER * spec.in_commit
        return ImageForm(
            spec.run_id, spec.shard, spec.lo, spec.hi, list(spec.slots), spec.averaged,
            _whole_pages(commit_bytes), boot_id, spec.table, spec.dtype,
            dict(spec.kept or {}),
        )  # fmt: skip

    @property
    def size(self) -> int:
        return self.hi - self.lo

    @property
    def names(self) -> list[str]:
        return [W, *self.slots]

    @property
    def index_dtype(self) -> np.dtype[Any]:
        return np.dtype("<u4" if self.size <= 2**32 else "<i8")

    @property
    def value_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def undo_max(self) -> int:
        """Maximum number of elements of a sparse update."""
        return self.size // UNDO_PART

    # ------------------------------------------------------------ offsets

    def commit_at(self, which: int) -> int:
        return PAGE + which * self.commit_bytes

    @property
    def undo_at(self) -> int:
        return self.commit_at(2)

    @property
    def extras_at(self) -> int:
        return self.undo_at + _whole_pages(sum(self._undo_parts()))

    def buffer_at(self, which: int) -> int:
        extras = _whole_pages(8 * self.averaged)
        return self.extras_at + extras + which * self._buffer_bytes

    @property
    def total_bytes(self) -> int:
        return self.buffer_at(BUFFERS)

    def _arrays(self) -> list[tuple[str, int, int]]:
        """(name, elements, bytes with padding) of each array of a buffer."""
        counts = [(name, self.size) for name in self.names]
        counts += [(KEPT + name, count) for name, count in self.kept.items()]
        width = self.value_dtype.itemsize
        return [(name, count, _whole_pages(width * count)) for name, count in counts]

    @property
    def _buffer_bytes(self) -> int:
        return sum(size for _, _, size in self._arrays())

    def _undo_parts(self) -> list[int]:
        """Bytes reserved for its number and marks, the indices, and the values of each vector."""
        marks = 8 * (2 + -(-self.undo_max // PLACES))
        indices = _whole_words(self.index_dtype.itemsize * self.undo_max)
        values = _whole_words(self.value_dtype.itemsize * self.undo_max)
        return [marks, indices, *(values for _ in self.names)]

    # ------------------------------------------------------------ views

    def vectors(self, buffer: Any, which: int) -> dict[str, Array]:
        """Name -> the vector in one of the two buffers."""
        at, found = self.buffer_at(which), dict[str, Array]()
        for name, count, size_bytes in self._arrays():
            found[name] = np.frombuffer(buffer, self.value_dtype, count, at)
            at += size_bytes
        return found

    def extras(self, buffer: Any) -> Array:
        """The averaged buffers, float64."""
        return np.frombuffer(buffer, "<f8", self.averaged, self.extras_at)

    def undo(self, buffer: Any) -> Undo:
        parts: list[Array] = []
        at = self.undo_at
        for size_bytes in self._undo_parts():
            parts.append(np.frombuffer(buffer, "<u8", size_bytes // 8, at))
            at += size_bytes
        marks, indices, *values = parts
        return Undo(
            marks[:2], marks[2:], parts[1:], indices.view(self.index_dtype),
            [words.view(self.value_dtype) for words in values],
        )  # fmt: skip

    def extras_crc(self, buffer: Any) -> int:
        return zlib.crc32(self.extras(buffer).data)

    def vectors_crc(self, buffer: Any, which: int) -> int:
        crc = 0
        for array in self.vectors(buffer, which).values():
            crc = zlib.crc32(array.data, crc)
        return crc


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE


def _whole_words(size_bytes: int) -> int:
    return -(-size_bytes // 8) * 8


# ---------------------------------------------------------------- the header


def write_header(buffer: Any, form: ImageForm) -> None:
    body = msgpack.packb({"format": FORMAT, "bytes": form.total_bytes, **asdict(form)})
    assert _HEADER.size + len(body) <= DONE_AT, f"the header has {len(body)} bytes"
    header = _HEADER.pack(MAGIC, zlib.crc32(body), len(body)) + body
    memoryview(buffer)[: len(header)] = header


def read_header(buffer: Any) -> ImageForm:
    """The form of a state, its length checked. Raises Unusable."""
    view = memoryview(buffer)
    if len(view) < PAGE:
        raise Unusable(f"it has {len(view)} bytes, less than its header")
    magic, crc, length = _HEADER.unpack_from(view)
    body = bytes(view[_HEADER.size : _HEADER.size + length])
    if magic == bytes(8):
        raise Unusable("the server that created it was killed before it had finished")
    if magic != MAGIC:
        raise Unusable("it is not the state of a shard")
    if length > DONE_AT - _HEADER.size or zlib.crc32(body) != crc:
        raise Unusable("its header is damaged")
    found = read_body(body)
    if found.get("format") != FORMAT:
        what = f"it has format {found.get('format')!r:.60}"
        raise Unusable(f"{what}, this dlctl reads format {FORMAT}")
    form = _form_of(found)
    if len(view) != form.total_bytes:
        how = "cut off" if len(view) < form.total_bytes else "too long"
        raise Unusable(f"it is {how}: {len(view)} bytes, the header says {form.total_bytes}")
    return form


def _form_of(found: Json) -> ImageForm:
    """The form in a header, with natural sizes. Raises Unusable if a type is wrong."""
    values: dict[str, Any] = {field.name: found.get(field.name) for field in fields(ImageForm)}
    values["kept"] = kept = found.get("kept", {})  # Earlier versions had none.
    if type(kept) is not dict or not all(type(name) is str for name in kept):
        raise Unusable("its header has no names of what is kept beside matrices")
    texts = [values["run_id"], values["boot_id"], values["table"], values["dtype"]]
    slots = values["slots"]
    numbers = [
        n
        for name, n in values.items()
        if name not in ("run_id", "boot_id", "slots", "table", "dtype", "kept")
    ] + [*kept.values()]
    if type(slots) is not list or not all(type(text) is str for text in (*texts, *slots)):
        raise Unusable("its header has no names of run, boot and slots")
    if values["dtype"] not in ("float32", "float64"):
        raise Unusable(f"its values are {values['dtype']:.20}")
    if not all(type(n) is int and 0 <= n < 2**48 for n in numbers) or values["hi"] < values["lo"]:
        raise Unusable("its header has no sizes")
    form = ImageForm(**values)
    if form.commit_bytes < COMMIT_BYTES_MIN or form.total_bytes != found.get("bytes"):
        raise Unusable("the sizes in its header are inconsistent")
    return form


def check_is(form: ImageForm, wanted: ImageForm) -> None:
    """Raises Unusable, naming the first field in which a state differs from the wanted one."""
    if form.run_id != wanted.run_id:
        raise Unusable(f"it is of run {form.run_id:.100}, not of {wanted.run_id}")
    if form.boot_id != wanted.boot_id:
        raise Unusable(
            "it is of before a reboot: not all of it may have come to the disk",
            hint='resume from a checkpoint; [servers] durability = "disk" survives a power loss',
        )
    for field in fields(ImageForm):
        found, expected = getattr(form, field.name), getattr(wanted, field.name)
        if found != expected:
            what = field.name.replace("_", " ")
            raise Unusable(f"it has {what} {found!s:.100}, this server has {expected}")


# ---------------------------------------------------------------- commits


@dataclass(slots=True)
class CommittedState:
    """A consistent state of the shard."""

    number: int
    """Counts commits; the state was created with commit 1."""
    current: int
    """The active buffer: 0 is A, 1 is B."""
    body: Json
    """{"state": of the shard, "updated": whether there was an update since its values were set,
    "extras": their CRC-32 or None while there are none, "sealed": CRC-32 of the vectors or None}.
    """


def pack_commit(form: ImageForm, commit: CommittedState) -> bytes:
    """The bytes of a commit. Raises DlctlError if it does not fit."""
    body: bytes = msgpack.packb(commit.body)
    head = _COMMIT.pack(0, len(body), commit.number, commit.current)
    data = head[_CRC_BYTES:] + body
    if _CRC_BYTES + len(data) > form.commit_bytes:
        raise DlctlError(f"a commit has {len(data)} bytes; {form.commit_bytes} are reserved")
    return struct.pack("<I", zlib.crc32(data)) + data


def read_commit(buffer: Any, form: ImageForm, which: int) -> CommittedState | None:
    """A commit, or None if it was not written completely or is damaged."""
    place = memoryview(buffer)[form.commit_at(which) : form.commit_at(which + 1)]
    crc, length, number, current = _COMMIT.unpack_from(place)
    if number == 0 or _COMMIT.size + length > form.commit_bytes:
        return None
    data = bytes(place[_CRC_BYTES : _COMMIT.size + length])  # A server may be writing there.
    if zlib.crc32(data) != crc:
        return None
    try:
        body = read_body(data[_COMMIT.size - _CRC_BYTES :])
    except Unusable:
        return None
    whole = number < 2**63 and current < BUFFERS and _is_body(body)
    return CommittedState(number, current, body) if whole else None


def _is_body(body: Json) -> bool:
    sums = (body.get("extras", ""), body.get("sealed", ""))
    return "state" in body and all(crc is None or type(crc) is int for crc in sums)


def done_mark(buffer: Any) -> Array:
    """uint64[2]: the number of the last completely written commit, twice.

    If the two differ, a kill came between the stores, and they are not used.
    """
    return np.frombuffer(buffer, "<u8", 2, DONE_AT)


def _whole_commits(buffer: Any, form: ImageForm) -> list[CommittedState]:
    return [commit for i in (0, 1) if (commit := read_commit(buffer, form, i)) is not None]


def last_seen_commit(buffer: Any, form: ImageForm) -> CommittedState:
    """The newest complete commit. Raises Unusable."""
    commits = _whole_commits(buffer, form)
    if not commits:
        raise Unusable("neither of its two commits is complete")
    return max(commits, key=lambda commit: commit.number)


def commit_of_living(buffer: Any, form: ImageForm) -> CommittedState:
    """The newest commit of a state that a running server may be writing: at least the last one that
    was complete when this was called.

    Raises Unusable, also if that was overwritten while it was read: retry.
    """
    done = min(done_mark(buffer).tolist())
    seen = last_seen_commit(buffer, form)
    if seen.number < done:
        raise Unusable("a server is writing it")
    return seen


def newest_commit(buffer: Any, form: ImageForm) -> CommittedState:
    """The valid commit of a state whose server is gone; its extras checked.

    Raises Unusable.
    """
    newest = last_seen_commit(buffer, form)
    done, again = done_mark(buffer).tolist()
    if done == again and newest.number < done:
        raise Unusable(f"its newest commit, number {done}, is damaged")
    if newest.body["extras"] not in (None, form.extras_crc(buffer)):
        raise Unusable("its averaged buffers are damaged")
    return newest


def check_seal(buffer: Any, form: ImageForm, newest: CommittedState) -> None:
    """Raises Unusable if the vectors have changed since the state was closed. The undo record must
    have been applied before."""
    sealed = newest.body["sealed"]
    if sealed is not None and sealed != form.vectors_crc(buffer, newest.current):
        raise Unusable("its vectors are damaged: they have changed since it was closed")


def check_finite(vectors: Mapping[str, Array]) -> None:
    """Raises Unusable, naming the first vector with an infinity or a NaN."""
    for name, array in vectors.items():
        if not all_finite(array):
            raise Unusable(f'its vector "{name}" has values that are not finite')


def has_updates(buffer: Any, spec: Spec, boot_id: str) -> bool:
    """Whether a buffer is a state of this shard with committed updates."""
    try:
        form = read_header(buffer)
    except Unusable:
        return False
    identity = (spec.run_id, spec.shard, spec.table, boot_id)
    if (form.run_id, form.shard, form.table, form.boot_id) != identity:
        return False
    return any(bool(commit.body.get("updated")) for commit in _whole_commits(buffer, form))
