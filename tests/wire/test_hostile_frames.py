"""What a stranger or a broken peer may send: refused with RemoteProtocolError, and nothing else."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlctl.errors import RemoteProtocolError
from dlctl.wire import codec
from dlctl.wire.messages import Ack, ChangeSettings, Fetch, Packed, Parameters, Push, Welcome

FETCH = [codec.PROTOCOL, Fetch.code, [0, 1, 2, 3, 4, 5, False, 0, 0, 0, 0, False], []]
PARAMETERS = [codec.PROTOCOL, Parameters.code, [0, 1, 2, 3, None, False, 0, 0, 0], [[0, 2]]]


def refused(header: Any, *buffers: bytes, why: str | None = None) -> None:
    """why: a part of the reason."""
    raw = header if isinstance(header, bytes) else msgpack.packb(header)
    with pytest.raises(RemoteProtocolError, match=why):
        codec.decode([raw, *buffers])


def with_fields(values: list[Any]) -> list[Any]:
    return [codec.PROTOCOL, Fetch.code, values, []]


def test_the_honest_messages_that_the_others_differ_from_are_taken() -> None:
    assert codec.decode([msgpack.packb(FETCH)]) == Fetch(0, 1, 2, 3, 4, 5)
    assert isinstance(codec.decode([msgpack.packb(PARAMETERS), bytes(8)]), Parameters)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"GET / HTTP/1.1\r\n",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x90" * (codec.HEADER_BYTES_MAX - 1),
        msgpack.packb(FETCH) + b"\x00",
        msgpack.packb({1: 2}),
        msgpack.packb(msgpack.ExtType(1, b"x")),
        msgpack.packb(msgpack.Timestamp(0)),
        b"\x94\x01\xa2\xff\xfe\x90\x90",
        b"\x00" * (codec.HEADER_BYTES_MAX + 1),
    ],
    ids=[
        "empty", "another protocol", "reserved byte", "four billion items", "deep nesting",
        "many empty lists", "trailing byte", "a map", "extension type", "timestamp",
        "invalid UTF-8", "too long",
    ],
)  # fmt: skip
def test_a_header_that_is_not_ours_is_refused(raw: bytes) -> None:
    refused(raw)


@pytest.mark.parametrize("protocol", [0, codec.PROTOCOL + 1, 999, "1", None, True])
def test_another_protocol_is_refused(protocol: Any) -> None:
    refused([protocol, *FETCH[1:]], why="peer speaks protocol")


def test_our_protocol_as_another_type_is_another_protocol() -> None:
    refused([float(codec.PROTOCOL), *FETCH[1:]], why="peer speaks protocol of type float")


@pytest.mark.parametrize("code", [-1, 10_000, "Fetch", None, [1]])
def test_an_unknown_message_is_refused(code: Any) -> None:
    refused([codec.PROTOCOL, code, *FETCH[2:]], why="no message has code")


def test_a_code_that_only_equals_that_of_a_message_is_unknown() -> None:
    """All else is right: the message whose code is 1, and True in its place."""
    header, *buffers = codec.encode(Welcome("worker-0", 0, 1, b"token", {}))
    _, code, *rest = msgpack.unpackb(header)
    assert code == 1
    refused([codec.PROTOCOL, True, *rest], *buffers, why="no message has code of type bool")


def test_a_message_whose_header_is_too_long_is_refused_however_right_it_is() -> None:
    """No text in it is longer than a text may be."""
    texts = ["x" * (codec.STRING_MAX - 1)] * 3
    raw = msgpack.packb([codec.PROTOCOL, ChangeSettings.code, [1, {"texts": texts}], []])
    refused(raw, why=f"header of {len(raw)} bytes; at most {codec.HEADER_BYTES_MAX}")


@pytest.mark.parametrize("value", [True, -1, 2**63, 2**64 - 1, 1.0, float("nan"), "1", None, [1]])
def test_a_number_must_be_exactly_a_natural_number(value: Any) -> None:
    refused(with_fields([0, 1, 2, 3, 4, value, False]))


@pytest.mark.parametrize(
    "values",
    [
        [],
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 5, False, 7],
        {"slot": 0},
        None,
    ],
)
def test_fields_may_be_neither_missing_nor_too_many(values: Any) -> None:
    refused([codec.PROTOCOL, Fetch.code, values, []])


@pytest.mark.parametrize(
    "shape",
    [
        [0, 3], [0, 1], [0, -1], [0, 2**62], [8, 2], [-1, 2], ["<f4", 2], [0], [0, 2, 1], 2, None,
        [0, 2.0],
    ],
    ids=str,
)  # fmt: skip
def test_a_frame_must_be_as_long_as_its_description_says(shape: Any) -> None:
    refused([*PARAMETERS[:3], [shape]], bytes(8))


def test_every_frame_belongs_to_a_field() -> None:
    refused(PARAMETERS)
    refused(FETCH, bytes(8))
    refused([*FETCH[:3], [[0, 2]]], bytes(8))
    refused([*PARAMETERS[:3], [[0, 2], [0, 2]]], bytes(8), bytes(8))


def test_a_hundred_thousand_frames_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="frames"):
        codec.decode([msgpack.packb(FETCH)] + [b"x"] * 100_000)


def test_a_packed_vector_may_not_claim_frames_that_are_not_there() -> None:
    push = Push(0, 1, 1, 0, 0, 0, 0, 1, 0, Packed("topk", 8, (np.zeros(2, np.float32),)))
    frames = [bytes(frame) for frame in codec.encode(push)]
    header = msgpack.unpackb(frames[0])
    packed, _ = (field for field in header[2] if isinstance(field, list))
    for count in (0, 2, 17, 2**40, -1, None):
        packed[2] = count
        refused(header, *frames[1:])


def test_json_is_plain_shallow_and_has_text_as_keys() -> None:
    deep: Any = 1
    for _ in range(20):
        deep = [deep]
    for value in ({"a": deep}, {1: 2}, [1], None, {"a": {True: 1}}):
        refused([codec.PROTOCOL, ChangeSettings.code, [1, value], []])


@pytest.mark.parametrize(
    "begin",
    [
        b"\x91", b"\x9f", b"\x81\x00", b"\xdc\x00\x01", b"\xdd\x00\x00\x00\x01",
        b"\xde\x00\x01\x00", b"\xdf\x00\x00\x00\x01\x00",
    ],
)  # fmt: skip
def test_lists_and_maps_of_every_form_are_refused_before_one_too_many_is_open(begin: bytes) -> None:
    raw = msgpack.packb(FETCH)[:-2] + begin * (codec.LISTS_MAX + 1)
    with pytest.raises(RemoteProtocolError, match="nested"):
        codec.decode([raw])


def test_a_header_costs_no_more_memory_than_a_few_times_its_size() -> None:
    """msgpack makes 70 bytes of one; the limit on a header bounds that."""
    raw = msgpack.packb([codec.PROTOCOL, Ack.code, [[]] * 4000, []])
    tracemalloc.start()
    refused(raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


@given(st.lists(st.binary(max_size=200), max_size=6))
def test_random_frames_are_refused(frames: list[bytes]) -> None:
    try:
        codec.decode(frames)
    except RemoteProtocolError:
        return
    raise AssertionError("random bytes made a message")


@given(st.data())
def test_a_message_with_a_few_bytes_changed_is_refused_or_decoded(data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in codec.encode(Parameters(0, 1, 2, 3, np.zeros(4, "f4")))]
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(frames[0]) - 1))
        frames[0][place] = data.draw(st.integers(0, 255))
    with suppress(RemoteProtocolError):
        codec.decode([bytes(frame) for frame in frames])
