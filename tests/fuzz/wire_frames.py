"""The decoder of messages, and what servers and coordinator make of their contents at once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields
from random import Random
from typing import Any, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

from dlctl import registry
from dlctl.compress import indices
from dlctl.errors import LocalProtocolError, RemoteProtocolError
from dlctl.model.flat import Layout
from dlctl.roles.coordinator.training.dataset import Dataset
from dlctl.roles.worker.received_slice import slice_in
from dlctl.wire import codec
from dlctl.wire.messages import (
    MESSAGES,
    Array,
    Assign,
    ChangeSettings,
    Json,
    Message,
    ModelReady,
    Packed,
    Parameters,
    Push,
    SparseParameters,
)

from . import mutation, trees
from .parts import join, split

NAME = "wire"
MEMORY_BYTES = 2_000_000
MEMORY_PER_BYTE = 100
"""An empty map is one byte of msgpack and 64 bytes of memory, and 8 for its place in a list."""
SHARD_ELEMENTS_MAX = 4096
LAYOUT = [
    ["weight", "trained", [4, 3], "float32", ["tied"]],
    ["bias", "trained", [3], "bfloat16", []],
    ["mean", "averaged", [4], "float32", []],
    ["frozen", "constant", [2], "float32", []],
]
_EXAMPLES: dict[str, Any] = {
    str(str): "worker-0",
    str(bool): True,
    str(bytes): b"\x00\x01secret",
    str(Json): {"lr": 0.1, "name": "topk", "nested": {"values": [1, None, True, {"a": -1}]}},
    str(Array): np.linspace(-1, 1, 5, dtype=np.float32),
    str(Packed): Packed("none", 5, (np.linspace(-1, 1, 5, dtype=np.float32),)),
}
_LOOSE = {"strict_map_key": False, "raw": False, "unicode_errors": "surrogateescape"}
_TOKENS = [
    msgpack.packb(value)
    for value in (
        *(n for n in trees.NUMBERS if n == n),
        *(t for t in trees.TEXTS if t.isprintable()),
        *(None, True, False, [], {}, [[]]),
        *(b"bytes", b"", msgpack.ExtType(1, b"x"), msgpack.ExtType(1, b""), msgpack.Timestamp(0)),
        codec.PROTOCOL,
    )
] + [b"\xdc\x10\x00", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 600, b"\xc1"]


# ---------------------------------------------------------------- what is tried


def seeds() -> list[bytes]:
    """A valid encoding of every message; of pushes one for every kind of compressor."""
    messages = [_example(kind) for kind in MESSAGES.values()]
    push = next(message for message in messages if isinstance(message, Push))
    pushes = [Push(**{**_values(push), "delta": packed}) for packed in _compressed()]
    layout = Layout.from_rows(LAYOUT).to_bytes()
    models = [ModelReady("worker-0", layout, 1797), Assign((0, 15), layout, "")]
    models += [ModelReady("worker-0", layout, 0, shards=2, names="a\nb/\u00e9".encode())]
    slices = [SparseParameters(0, 1, 2, 7, 5, *_changes()), Parameters(0, 1, 2, 7, _changes()[0])]
    long = [ChangeSettings(1, {"list": list(range(400)), "x": "text" * 1000})]
    return [
        join(map(bytes, codec.encode(m))) for m in (*messages, *pushes, *models, *slices, *long)
    ]


def _changes() -> tuple[Array, Array, tuple[int, ...], tuple[int, ...]]:
    """Of a slice of 50 elements, in two parts."""
    parts = (np.array([3, 17, 49]), np.array([0, 17]))
    packed = [indices.pack(part, 50) for part in parts]
    lengths = tuple(part.size for part in packed)
    return np.linspace(-1, 1, 5, dtype=np.float32), np.concatenate(packed), (3, 2), lengths


def _values(message: Message) -> dict[str, Any]:
    return {f.name: getattr(message, f.name) for f in fields(message)}  # type: ignore[arg-type]


def _example(kind: type[Message]) -> Message:
    hints = get_type_hints(kind, include_extras=True)
    return kind(*(_example_of(hints[field.name]) for field in fields(kind)))  # type: ignore[arg-type]


def _example_of(hint: Any) -> Any:
    if get_origin(hint) is tuple:
        return (_example_of(get_args(hint)[0]),) * 3
    if (limits := codec.limits_of(hint)) is None:
        return _EXAMPLES[str(hint)]
    return 0.25 if isinstance(limits.least, float) else 3 if limits.least == 0 else -9


def _compressed() -> Iterable[Packed]:
    u = np.linspace(-1, 1, 50, dtype=np.float32)
    for name in registry.names("compressors"):
        kind = registry.load("compressors", name)
        known = kind.Options.__dataclass_fields__
        for values in ("float32", "float16", "bfloat16") if "values" in known else (None,):
            options = {"values": values} if values else {}
            for least in (0, 1024) if "dense_below" in known else (None,):
                options |= {} if least is None else {"dense_below": least}
                yield kind(kind.Options(**options)).take(u.copy())


def mutate(random: Random, data: bytes, other: bytes) -> bytes:
    frames, others = split(data) or [b""], split(other) or [b""]
    choice = random.randrange(10)
    if choice < 6:
        frames[0] = _change_header(random, frames[0], others[0])
    elif choice < 8:
        frames[0] = mutation.mutate(random, frames[0], others[0], _TOKENS)
    elif choice == 8:
        frames = _change_buffers(random, frames, others)
    else:
        return mutation.mutate(random, data, other, _TOKENS)
    return join(frames)


def _change_header(random: Random, header: bytes, other: bytes) -> bytes:
    try:
        tree, another = (msgpack.unpackb(raw, **_LOOSE) for raw in (header, other))
        changed = trees.mutate(random, tree, another)
        packed = msgpack.packb(
            changed,
            use_single_float=random.random() < 0.1,
            unicode_errors="surrogatepass",
        )
    except (ValueError, TypeError, OverflowError, RecursionError):
        return mutation.mutate(random, header, other, _TOKENS)
    return trees.deep_msgpack(random, packed)


def _change_buffers(random: Random, frames: list[bytes], others: list[bytes]) -> list[bytes]:
    """Other contents of the raw frames; sometimes their lengths are put right in the header."""
    at = random.randrange(len(frames))
    buffer = _change_buffer(random, frames[at], random.choice(others))
    if at == 0:
        return [frames[0], *frames[1:], buffer] if random.random() < 0.5 else frames[:-1]
    frames[at] = buffer
    with suppress(ValueError, TypeError, LookupError):
        tree = msgpack.unpackb(frames[0], **_LOOSE)
        tree[3][at - 1][1] = len(buffer) // codec.DTYPES[tree[3][at - 1][0]].itemsize
        frames[0] = msgpack.packb(tree)
    return frames


def _change_buffer(random: Random, buffer: bytes, other: bytes) -> bytes:
    """As JSON if it is the layout of a model, else as bytes."""
    if buffer.startswith(b"["):
        with suppress(ValueError, RecursionError, TypeError):
            tree = json.loads(buffer)
            text = json.dumps(trees.mutate(random, tree, json.loads(buffer)))
            return trees.deep_json(random, text).encode()
    return mutation.mutate(random, buffer, other, _TOKENS)


# ---------------------------------------------------------------- what must hold


def target(data: bytes) -> None:
    """What is decoded is what `encode` made; all else is refused, and with one class of errors."""
    frames = split(data)
    if frames:
        frames[0] = _of_today(frames[0])
    try:
        message = codec.decode(frames)
    except RemoteProtocolError:
        return
    again = [bytes(frame) for frame in codec.encode(message)]
    assert again == frames, "the same message has another form on the wire"
    assert len(repr(message)) < 2000, "a message is too long for a log"
    for value in _values(message).values():
        if isinstance(value, dict):
            json.dumps(value)
    if isinstance(message, Push):
        _expand(message.delta)
    if isinstance(message, ModelReady | Assign):
        _read_layout(message.layout)
    if isinstance(message, ModelReady):
        _read_dataset(message)
    if isinstance(message, Parameters | SparseParameters):
        _read_slice(message)


def _of_today(header: bytes) -> bytes:
    """A header of an older protocol as one of this: what is kept must not lose its meaning."""
    if header[:1] == b"\x94" and header[1:2] < bytes([codec.PROTOCOL]):
        return header[:1] + bytes([codec.PROTOCOL]) + header[2:]
    return header


def _expand(packed: Packed) -> None:
    for size in {0, 7, 50, min(packed.length, SHARD_ELEMENTS_MAX)}:
        for name in registry.names("compressors"):
            try:
                delta = registry.load("compressors", name).expand(packed, size)
            except RemoteProtocolError:
                continue
            values, where, _ = delta
            assert values.dtype == np.float32
            assert values.ndim == 1
            if where is None:
                assert values.size == size
                continue
            assert where.dtype == np.int64
            assert where.shape == values.shape
            assert np.all(np.diff(where) > 0)
            assert not where.size or 0 <= where[0] <= where[-1] < size


def _read_slice(message: Parameters | SparseParameters) -> None:
    for size in (0, 5, 50, 1000):
        try:
            arrived = slice_in(message, size)
        except RemoteProtocolError:
            continue
        assert arrived.values.dtype == np.float32
        if arrived.where is None:
            assert arrived.values.shape == (size,)
            continue
        assert arrived.where.shape == arrived.values.shape
        assert np.all((arrived.where >= 0) & (arrived.where < size))


def _read_dataset(message: ModelReady) -> None:
    try:
        dataset = Dataset.built(message)
    except RemoteProtocolError:
        return
    if dataset.names:
        assert sorted(dataset.order) == list(range(dataset.shards))
    assert Dataset().met("worker-0", dataset, resumes=True) == dataset
    assert dataset.met("worker-1", dataset, resumes=False) == dataset


def _read_layout(data: bytes) -> None:
    try:
        layout = Layout.from_bytes(data)
    except RemoteProtocolError:
        return
    sizes = [layout.size(kind) for kind in ("trained", "averaged", "constant")]
    assert all(type(size) is int and 0 <= size < 2**63 for size in sizes)
    assert Layout.from_bytes(layout.to_bytes()) == layout
    with suppress(LocalProtocolError):  # a header that is too long
        codec.encode(ChangeSettings(0, {"layout": layout.to_rows()}))
