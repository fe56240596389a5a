"""Large messages in segments: whole, or not there."""

from __future__ import annotations

import struct
import time

import numpy as np
import pytest
from house import COME_S, GUEST, HEARD, HERE, House, guest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemons import segments
from daemons.segments import Assembly, cut
from daemons.transport import Transport
from dlctl import messages as m
from dlctl import wire
from dlctl.errors import RemoteProtocolError
from dlctl.machine import Coming
from dlctl.wire import Frames, decode, encode

MAX = 1 << 40
HEADER = b"\x94"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of which a test can have many."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 100)
    monkeypatch.setattr(segments, "FRAME_BYTES_MIN", 200)


def frames_of(lengths: list[int]) -> Frames:
    return [HEADER, *(bytes([i + 1]) * length for i, length in enumerate(lengths))]


def put_together(assembly: Assembly, parts: list[Frames], source: bytes = b"a") -> Frames | None:
    """What comes of the last one; nothing may come of those before it."""
    *first, last = parts
    for part in first:
        assert assembly.take(source, part, MAX) is None
    return assembly.take(source, last, MAX)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 40_000), max_size=6))
def test_whatever_is_cut_comes_out_as_it_was(lengths: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "SEGMENT_BYTES", 1000)
        patch.setattr(segments, "FRAME_BYTES_MIN", 2000)
        frames = frames_of(lengths)
        parts = list(cut(frames, 7)) if segments.are_large(frames) else [frames]
        assert len(parts) <= segments.SEGMENTS_MAX + len(lengths) + 1
        whole = put_together(Assembly(), parts)
    assert whole is not None
    assert [bytes(frame) for frame in whole] == frames


def test_what_is_not_cut_is_left_alone() -> None:
    frames: Frames = [b"\x94\x01", b"x" * 1000]
    assert not segments.are_large(frames)
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
    with pytest.raises(RemoteProtocolError, match="at most 900"):
        Assembly().take(b"a", part, 900)


def test_a_message_that_there_is_no_memory_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr(np, "empty", no_memory)
    part = next(cut(frames_of([segments.FRAME_BYTES_MIN]), 1))
    with pytest.raises(RemoteProtocolError, match="no memory"):
        Assembly().take(b"a", part, MAX)


def test_a_message_of_as_many_frames_as_there_may_be_arrives_in_segments(house: House) -> None:
    """With its peer and two frames of its own it has more than any other message."""
    arrays = tuple(np.full(1_048_576, i, np.float32) for i in range(wire.FRAMES_MAX - 1))
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


@settings(deadline=None, max_examples=300)
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
    for kind, number, place, rest, cut_off in given_parts:
        head = segments._HEAD.pack(kind, number, place)[: 20 - max(0, cut_off - 20)]
        try:
            whole = assembly.take(b"a", [head, *rest], 2000)
            part = assembly.coming(b"a")
        except RemoteProtocolError:
            continue
        assert whole is None or 0 < sum(map(len, whole)) <= 2000
        assert part is None or part[1] <= sum(map(len, part[0])) + 64 * len(part[0])


@pytest.mark.usefixtures("small")
def test_what_has_come_of_a_message_can_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "STEP_BYTES", 250)
    frames, assembly, steps = frames_of([20, 950, 10]), Assembly(), []
    for part in list(cut(frames, 1))[:-1]:
        assert assembly.take(b"a", part, MAX) is None
        coming = assembly.coming(b"a")
        assert assembly.coming(b"b") is None
        if coming is not None:
            (header, short, cut_one, last), nbytes = coming
            assert [header, short, last] == [frames[0], frames[1], frames[3]]
            assert bytes(cut_one[:nbytes]) == frames[2][:nbytes]
            steps.append(nbytes)
    assert steps == [300, 600, 900]


@pytest.mark.usefixtures("small")
def test_a_message_that_is_given_up_while_it_comes_never_arrives() -> None:
    assembly, (first, second, *others) = Assembly(), list(cut(frames_of([950]), 1))
    for part in (first, second):
        assembly.take(b"a", part, MAX)
    assembly.forget(b"a")
    assert [assembly.take(b"a", part, MAX) for part in others] == [None] * len(others)


def test_a_large_push_is_heard_of_while_it_comes_and_refused_once(house: House) -> None:
    """Of one that no reader could use, nothing more is looked at."""
    early: list[Coming] = []
    house.transport.on_coming = early.append
    values = np.arange(5_000_000, dtype=np.float32)
    push = m.Push(0, 1, 1, 0, 0, 0, 0, 1, 0, m.Packed("none", values.size, (values,)))
    with guest(house) as transport:
        transport.send(HERE, push)
        ((came, _),) = house.hears(COME_S)
        assert isinstance(came, m.Push)
        counts = [part.nbytes for part in early]
        assert counts == sorted(counts)
        assert len(counts) == values.nbytes // segments.STEP_BYTES
        assert {part.identity for part in early} == {GUEST}
        (array,) = early[-1].message.delta.arrays
        assert np.shares_memory(array, came.delta.arrays[0])
        assert np.array_equal(array, values)
        header = wire.encode(m.Heard())[0]
        for part in cut([header, values.data], 1):
            transport._dealers[HERE].send_multipart(part)
        transport.send(HERE, HEARD)
        ((last, _),) = house.hears(COME_S)
        assert last == HEARD
        assert house.transport.refused == 1
        assert len(early) == len(counts)


@pytest.mark.usefixtures("small")
def test_what_nobody_goes_on_with_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    assembly, clock = Assembly(), [0.0]
    monkeypatch.setattr(segments.time, "monotonic", lambda: clock[0])
    first, *_ = cut(frames_of([950]), 1)
    assembly.take(b"a", first, MAX)
    clock[0] = segments.PATIENCE_S - 1
    assembly.check()
    assert len(assembly._partials) == 1
    clock[0] = segments.PATIENCE_S + 1
    assembly.check()
    assert not assembly._partials


def test_a_shard_goes_there_and_back_over_real_connections(house: House) -> None:
    values = np.random.default_rng(0).standard_normal(3_000_000).astype(np.float32)
    sent = m.Initialise(0, 1, values, values.astype(np.float64), values[:5])
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
            for _, message, _ in transport.receive(source):
                return message
    pytest.fail("no message came")


def assert_same(came: m.Message, sent: m.Initialise) -> None:
    assert isinstance(came, m.Initialise)
    for name in ("values", "averaged", "constant"):
        assert np.array_equal(getattr(came, name), getattr(sent, name))


def test_arrays_of_a_message_in_segments_lie_as_they_have_to() -> None:
    values = np.arange(1_100_000, dtype=np.float32)
    message = m.Initialise(0, 1, values, np.arange(600_001.0), values[:9])
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
