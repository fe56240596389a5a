"""Large messages in segments: whole, or not there."""

from __future__ import annotations

import struct
import time

import numpy as np
import pytest
from example_counts import times
from guarded_port import COME_S, GUEST, HEARD, HERE, House, guest
from hypothesis import given
from hypothesis import strategies as st

from daemons.transport import chunking
from daemons.transport.chunking import Assembly, cut
from daemons.transport.large_messages import LargeMessages
from daemons.transport.shm import KEEP_S
from daemons.transport.sockets import Transport
from dlctl.errors import RemoteProtocolError
from dlctl.wire import codec
from dlctl.wire import messages as m
from dlctl.wire.codec import Frames, decode, encode

MAX = 1 << 40
HEADER = b"\x94"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of which a test can have many."""
    monkeypatch.setattr(chunking, "SEGMENT_BYTES", 100)
    monkeypatch.setattr(chunking, "FRAME_BYTES_MIN", 200)


def frames_of(lengths: list[int]) -> Frames:
    return [HEADER, *(bytes([i + 1]) * length for i, length in enumerate(lengths))]


def put_together(assembly: Assembly, parts: list[Frames], source: bytes = b"a") -> Frames | None:
    """What comes of the last one; nothing may come of those before it."""
    *first, last = parts
    for part in first:
        assert assembly.take(source, part, MAX) is None
    return assembly.take(source, last, MAX)


@times(0.5)
@given(st.lists(st.integers(0, 40_000), max_size=6))
def test_whatever_is_cut_comes_out_as_it_was(lengths: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "SEGMENT_BYTES", 1000)
        patch.setattr(chunking, "FRAME_BYTES_MIN", 2000)
        frames = frames_of(lengths)
        is_large = max(map(len, frames)) >= chunking.FRAME_BYTES_MIN
        parts = list(cut(frames, 7)) if is_large else [frames]
        assert len(parts) <= chunking.SEGMENTS_MAX + len(lengths) + 1
        whole = put_together(Assembly(), parts)
    assert whole is not None
    assert [bytes(frame) for frame in whole] == frames


def test_what_is_not_cut_is_left_alone() -> None:
    frames: Frames = [b"\x94\x01", b"x" * 1000]
    [outgoing], _ = LargeMessages().outgoing(b"a", frames, is_local=False)
    assert outgoing is frames
    assert Assembly().take(b"a", frames, MAX) is frames


@pytest.mark.usefixtures("small")
def test_a_message_that_lacks_a_segment_is_dropped_and_the_next_one_is_whole() -> None:
    frames, assembly = frames_of([950, 10, 300]), Assembly()
    parts = list(cut(frames, 1))
    for missing in range(len(parts) - 1):
        left = parts[:missing] + parts[missing + 1 :]
        assert put_together(assembly, left) is None
        whole = put_together(assembly, list(cut(frames, 100 + missing)))
        assert whole is not None
        assert [bytes(frame) for frame in whole] == frames


@pytest.mark.usefixtures("small")
def test_a_peer_that_begins_anew_with_the_same_number_is_understood() -> None:
    assembly, frames = Assembly(), frames_of([950])
    for part in list(cut(frames, 0))[:4]:
        assembly.take(b"a", part, MAX)
    whole = put_together(assembly, list(cut(frames_of([400]), 0)))
    assert whole is not None
    assert [bytes(frame) for frame in whole] == frames_of([400])


@pytest.mark.usefixtures("small")
def test_messages_of_two_connections_are_not_mixed_up() -> None:
    assembly = Assembly()
    one, other = (list(cut(frames_of([size]), 3)) for size in (700, 900))
    for a, b in zip(one[:-1], other[:-1], strict=False):
        assert assembly.take(b"a", a, MAX) is None
        assert assembly.take(b"b", b, MAX) is None
    for part in other[len(one) - 1 : -1]:
        assert assembly.take(b"b", part, MAX) is None
    for source, parts, size in ((b"a", one, 700), (b"b", other, 900)):
        whole = assembly.take(source, parts[-1], MAX)
        assert whole is not None
        assert [bytes(frame) for frame in whole] == frames_of([size])


@pytest.mark.usefixtures("small")
def test_a_message_that_is_too_large_is_refused_before_there_is_room_for_it() -> None:
    part = next(cut(frames_of([950]), 1))
    with pytest.raises(RemoteProtocolError, match=" 900"):
        Assembly().take(b"a", part, 900)


def test_a_message_that_there_is_no_memory_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr(np, "empty", no_memory)
    part = next(cut(frames_of([chunking.FRAME_BYTES_MIN]), 1))
    with pytest.raises(RemoteProtocolError, match="memory"):
        Assembly().take(b"a", part, MAX)


@pytest.mark.long
def test_a_message_of_as_many_frames_as_there_may_be_arrives_in_segments(house: House) -> None:
    """With its peer and two frames of its own it has more than any other message."""
    arrays = tuple(np.full(1_048_576, i, np.float32) for i in range(codec.FRAMES_MAX - 1))
    sent = m.Push(0, 1, 1, 0, 0, 0, 0, 1, 0, m.Packed("none", 1, arrays))
    with guest(house) as transport:
        transport.send(HERE, sent)
        ((came, _),) = house.hears(COME_S)
        assert isinstance(came, m.Push)
        assert [int(array[0]) for array in came.delta.arrays] == list(range(len(arrays)))


SIZES = st.sampled_from([0, 1, 10, 64, 100, 1000, 2**63, 2**64 - 1])
BEGINNINGS = st.lists(SIZES, max_size=4).map(
    lambda lengths: [struct.pack(f"<{len(lengths)}Q", *lengths), *[b""] * len(lengths)]
)
ANYTHING = st.lists(st.binary(max_size=80), max_size=4)


@times(3)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"\xc1beg", b"\xc1seg", b"\xc1xyz"]), st.integers(0, 3), SIZES,
            BEGINNINGS | ANYTHING, st.integers(0, 30),
        ),
        max_size=12,
    )
)  # fmt: skip
def test_segments_that_nobody_would_make_do_no_harm(given_parts: list[tuple]) -> None:
    assembly = Assembly()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "STEP_BYTES", 1)
        for kind, number, place, rest, cut_off in given_parts:
            head = chunking._HEAD.pack(kind, number, place)[: 20 - max(0, cut_off - 20)]
            try:
                whole = assembly.take(b"a", [head, *rest], 2000)
            except RemoteProtocolError:
                continue
            coming = assembly.coming(b"a")
            assert whole is None or 0 < sum(map(len, whole)) <= 2000
            if coming is not None:
                assert all(map(int.__le__, coming.come, map(len, coming.frames)))


def begun(assembly: Assembly, *lengths: int) -> None:
    """A message with these frames that are cut, and a small header."""
    packed = struct.pack(f"<{1 + len(lengths)}Q", 0, *lengths)
    head = chunking._HEAD.pack(b"\xc1beg", 1, 0)
    assert assembly.take(b"a", [head, packed, HEADER, *[b""] * len(lengths)], MAX) is None


def segment(place: int, data: bytes) -> Frames:
    return [chunking._HEAD.pack(b"\xc1seg", 1, place), data]


@pytest.mark.parametrize(
    "wrong",
    [
        segment(60, b"x" * 10), segment(10, b"x"), segment(0, b""), segment(0, b"x" * 101),
        segment(128, b"x"),
    ],
)  # fmt: skip
def test_a_segment_that_does_not_go_on_where_the_one_before_it_ended_ends_the_message(
    monkeypatch: pytest.MonkeyPatch, wrong: Frames
) -> None:
    """Whoever reads early has to know that what is there is what was sent."""
    monkeypatch.setattr(chunking, "STEP_BYTES", 1)
    assembly = Assembly()
    begun(assembly, 100, 50)
    assert assembly.take(b"a", wrong, MAX) is None
    assert assembly.coming(b"a") is None
    for part in (segment(0, b"a" * 100), segment(128, b"b" * 50)):
        assert assembly.take(b"a", part, MAX) is None


def test_how_much_has_come_is_known_of_each_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "STEP_BYTES", 1)
    assembly = Assembly()
    begun(assembly, 100, 50)
    steps = []
    for part in (segment(0, b"a" * 70), segment(70, b"b" * 30), segment(128, b"c" * 20)):
        assert assembly.take(b"a", part, MAX) is None
        coming = assembly.coming(b"a")
        assert coming is not None
        steps.append(tuple(coming.come))
        assert assembly.coming(b"a") is None, "nothing has come since"
    assert steps == [(1, 70, 0), (1, 100, 0), (1, 100, 20)]
    whole = assembly.take(b"a", segment(148, b"d" * 30), MAX)
    assert whole == [HEADER, b"a" * 70 + b"b" * 30, b"c" * 20 + b"d" * 30]


@pytest.mark.parametrize(
    ("lengths", "rest"),
    [
        ([64, 200], [b"", b""]), ([0, 0], [HEADER, b"x"]), ([0, 200], [HEADER, b"x"]),
        ([0, 2**64 - 1], [HEADER, b""]), ([0, 2**63, 2**63], [HEADER, b"", b""]),
    ],
)  # fmt: skip
def test_a_message_that_nobody_cuts_like_this_is_refused_at_its_beginning(
    lengths: list[int], rest: Frames
) -> None:
    """With a header among the segments, nobody would know where the values begin."""
    head = chunking._HEAD.pack(b"\xc1beg", 1, 0)
    packed = struct.pack(f"<{len(lengths)}Q", *lengths)
    with pytest.raises(RemoteProtocolError):
        Assembly().take(b"a", [head, packed, *rest], MAX)


def test_a_large_push_is_heard_of_while_it_comes(house: House) -> None:
    house.transport.early = m.Push
    values = np.arange(5_000_000, dtype=np.float32)
    push = m.Push(0, 1, 1, 0, 0, 0, 0, 1, 0, m.Packed("none", values.size, (values,)))
    with guest(house) as transport:
        transport.send(HERE, push)
        ((came, _),) = house.hears(COME_S)
    assert isinstance(came, m.Push)
    parts = house.parts
    steps = [part.come for part in parts]
    assert steps == [(i * chunking.STEP_BYTES,) for i in range(1, len(steps) + 1)]
    assert len(steps) == values.nbytes // chunking.STEP_BYTES
    assert {(part.identity, id(part.message)) for part in parts} == {(GUEST, id(parts[0].message))}
    (array,) = parts[0].message.delta.arrays
    assert np.shares_memory(array, came.delta.arrays[0])
    assert np.array_equal(array, values)


def test_what_is_no_push_is_not_looked_at_before_it_has_come(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of a message are copied when it is read: of what has not come, too."""
    house.transport.early = m.Push
    read: list[Frames] = []
    monkeypatch.setattr(codec, "decode", lambda frames: read.append(frames) or HEARD)
    push = codec.encode(m.Push(0, 1, 1, 0, 0, 0, 0, 1, 0, m.Packed("none", 0, ())))[0]
    data = bytes(3 * chunking.STEP_BYTES)
    with guest(house) as transport:
        for header in (codec.encode(m.Join("run", 0, 1, data))[0], b"\x94", push[:-1]):
            for part in cut([header, data], 1):
                transport._dealers[HERE].send_multipart(part)
            house.hears(COME_S)
            assert len(read) == 1, "only when all of it is there"
            read.clear()
    assert house.parts == []


@pytest.mark.usefixtures("small")
def test_what_nobody_goes_on_with_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    assembly, clock = Assembly(), [0.0]
    monkeypatch.setattr(chunking.time, "monotonic", lambda: clock[0])
    first, *_ = cut(frames_of([950]), 1)
    assembly.take(b"a", first, MAX)
    clock[0] = chunking.PATIENCE_S - 1
    assembly.check()
    assert len(assembly._arriving) == 1
    clock[0] = chunking.PATIENCE_S + 1
    assembly.check()
    assert not assembly._arriving


@pytest.mark.usefixtures("small")
def test_memory_is_kept_for_a_connection_that_needs_it_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two connections bring a message at once, in rounds: seldom, and then often."""
    assembly, clock = Assembly(), [0.0]
    monkeypatch.setattr(chunking.time, "monotonic", lambda: clock[0])
    kept = []
    for number, pause_s in enumerate((2 * KEEP_S, 2 * KEEP_S, KEEP_S / 2)):
        clock[0] += pause_s
        for source in (b"a", b"b"):
            whole = put_together(assembly, list(cut(frames_of([950]), number)), source)
            assembly.trim()
            assert len(assembly._memory._arrays) > 0, "somebody looks at it"
            del whole
        assembly.trim()
        kept.append(bool(assembly._memory._arrays))
    assert kept == [False, False, True]


def test_a_shard_goes_there_and_back_over_real_connections(house: House) -> None:
    values = np.random.default_rng(0).standard_normal(3_000_000).astype(np.float32)
    sent = m.Initialise(0, 1, values, values.astype(np.float64))
    with guest(house) as transport:
        transport.send(HERE, sent)
        (there,) = house.hears(COME_S)
        assert there[1] == GUEST
        assert_same(there[0], sent)
        transport.send(HERE, HEARD)
        house.transport.send(house.comes(COME_S), sent)
        assert_same(next_message(transport), sent)


def next_message(transport: Transport) -> m.Message:
    deadline = time.monotonic() + COME_S
    while time.monotonic() < deadline:
        for source, _ in transport.poller.poll(100):
            for came in transport.receive(source):
                return came.message
    pytest.fail("no message came")


def assert_same(came: m.Message, sent: m.Initialise) -> None:
    assert isinstance(came, m.Initialise)
    for name in ("values", "averaged"):
        assert np.array_equal(getattr(came, name), getattr(sent, name))


def test_arrays_of_a_message_in_segments_lie_as_they_have_to() -> None:
    values = np.arange(1_100_000, dtype=np.float32)
    message = m.Initialise(0, 1, values, np.arange(600_001.0))
    whole = put_together(Assembly(), list(cut(encode(message), 1)))
    assert whole is not None
    back = decode(whole)
    assert isinstance(back, m.Initialise)
    assert np.array_equal(back.values, values)
    assert np.array_equal(back.averaged, np.arange(600_001.0))
    assert back.values.flags.aligned
    assert back.averaged.flags.aligned


def test_a_shard_that_changes_after_it_was_sent_arrives_as_it_was(house: House) -> None:
    """A server gives a view of its shard; the next update may come before all bytes have left."""
    values = np.arange(3_000_000, dtype=np.float32)
    expected = values.copy()
    with guest(house) as transport:
        transport.send(HERE, HEARD)
        house.transport.send(house.comes(COME_S), m.Parameters(0, 1, 1, 1, values))
        values[:] = -1.0
        came = next_message(transport)
        assert isinstance(came, m.Parameters)
        assert np.array_equal(came.values, expected)
