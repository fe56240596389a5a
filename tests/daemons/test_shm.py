"""Messages in memory that two processes see: read in place, given back, never changed under a
reader.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Hashable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from example_counts import times
from hypothesis import given
from hypothesis import strategies as st

from daemons.loop import Loop
from daemons.transport import shm
from daemons.transport.shm import Borrower, Lender
from daemons.transport.sockets import Transport
from dlctl.errors import RemoteProtocolError
from dlctl.wire import messages as m
from dlctl.wire.codec import Frames
from dlctl.wire.machine import Effect, Event, Exit, Note, Received

MAX = 1 << 40
LARGE = shm.FRAME_BYTES_MIN
COME_S = 10.0
RECEIVER, OTHER = "server-0", "server-1"


@pytest.fixture
def lender() -> Iterator[Lender]:
    made = Lender()
    yield made
    made.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """[the time in seconds], which only the test moves."""
    now = [1000.0]
    monkeypatch.setattr(shm.time, "monotonic", lambda: now[0])
    return now


def frames_of(content: int, nbytes: int = LARGE) -> Frames:
    return [b"\x94", bytes([content]) * nbytes, b"small"]


def lend(lender: Lender, frames: Frames, receiver: Hashable = RECEIVER) -> tuple[Frames, shm.Loan]:
    lent = lender.lend(frames, receiver)
    assert lent is not None
    return lent


def test_what_is_lent_is_read_where_it_lies(lender: Lender) -> None:
    frames = [b"\x94", os.urandom(LARGE + 5), b"small", os.urandom(3 * LARGE)]
    sent, _ = lend(lender, frames)
    assert sum(map(len, sent)) < 1000
    read = Borrower().read(sent, MAX)
    assert read is not None
    assert [bytes(frame) for frame in read] == frames
    assert memoryview(read[1]).readonly


def resident_bytes() -> int:
    """Of all slots, in this process."""
    kilobytes = r"memfd:dlctl[^\n]*\n(?:\w+:[^\n]*\n)*?Rss: +(\d+)"
    return 1024 * sum(map(int, re.findall(kilobytes, Path("/proc/self/smaps").read_text())))


def test_what_lies_in_a_slot_is_resident_where_it_is_looked_at_and_no_longer(
    lender: Lender,
) -> None:
    borrower, nbytes = Borrower(), 32 * LARGE
    sent, _ = lend(lender, frames_of(7, nbytes))
    read = borrower.read(sent, MAX)
    assert read is not None
    assert resident_bytes() < LARGE, "written, and not looked at"
    values = np.frombuffer(read[1], np.uint8)
    assert values.sum() == 7 * nbytes
    assert resident_bytes() >= nbytes
    borrower.drop_pages()
    assert resident_bytes() < LARGE
    assert values.sum() == 7 * nbytes, "it is where it was"


def test_memory_that_is_seldom_needed_is_left_to_who_has_found_it(lender: Lender) -> None:
    sent, _ = lend(lender, frames_of(1))
    lender.trim()
    read = Borrower().read(sent, MAX)
    assert read is not None
    lender.trim()
    assert not lender._slots
    assert set(bytes(read[1])) == {1}


class Reads:
    """A machine that looks at a message, and has something done then."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        if not isinstance(event, Received):
            return []
        assert isinstance(event.message, m.Initialise)
        return [Note("info", str(event.message.values.sum())), Exit(0, "it has come")]

    def deadline(self) -> float | None:
        return None


def test_what_a_message_leads_to_begins_without_its_memory(tmp_path: Path) -> None:
    loop, there = Loop(), Transport(zmq.Poller())
    done: list[tuple[str, int]] = []
    loop.perform(Note, lambda note: done.append((note.text, resident_bytes())))
    values = np.ones(4 * LARGE, np.float32)
    there.connect("server-0", loop.transport.listen(f"ipc://{tmp_path}/socket"))
    there.send("server-0", m.Initialise(0, 1, values, values[:0]))
    loop.run(Reads())
    there.close()
    ((total, resident),) = done
    assert float(total) == values.sum()
    assert resident < LARGE


def test_memory_that_is_soon_needed_again_is_kept_by_both_ends(
    lender: Lender, clock: list[float]
) -> None:
    borrower, kept = Borrower(), []
    for pause_s in (2 * shm.KEEP_S, 2 * shm.KEEP_S, shm.KEEP_S / 2, shm.KEEP_S / 2):
        clock[0] += pause_s
        assert borrower.read(lend(lender, frames_of(1))[0], MAX) is not None
        borrower.give_back()
        lender.trim()
        kept.append((len(lender._slots), len(borrower._seen)))
    assert kept == [(0, 0), (0, 0), (1, 1), (1, 1)]


def test_a_slot_is_used_again_when_nobody_looks_at_it_and_not_before(lender: Lender) -> None:
    borrower = Borrower()
    first, loan = lend(lender, frames_of(1))
    read = borrower.read(first, MAX)
    assert read is not None
    values = np.frombuffer(read[1], np.uint8)[10:20]
    del read
    borrower.give_back()
    assert loan.done
    assert not loan.slot.is_back(loan.number)
    second, other = lend(lender, frames_of(2))
    assert other.slot is not loan.slot
    assert set(values) == {1}
    del values
    borrower.give_back()
    assert loan.slot.is_back(loan.number)
    assert lend(lender, frames_of(3))[1].slot is loan.slot
    assert loan.slot.is_back(loan.number), "what came back stays back, whoever has the slot now"
    assert borrower.read(second, MAX) is not None


def test_what_does_not_come_back_is_never_written_to_again(
    lender: Lender, clock: list[float]
) -> None:
    sent, loan = lend(lender, frames_of(1))
    read = Borrower().read(sent, MAX)
    assert read is not None
    clock[0] += shm.PATIENCE_S + 1
    lender.check()
    assert loan.slot.is_back(loan.number)
    for content in range(2, 20):
        lend(lender, frames_of(content))
    assert bytes(read[1]) == bytes(frames_of(1)[1])


def test_memory_that_is_not_used_for_a_while_is_let_go_on_both_sides(
    lender: Lender, clock: list[float]
) -> None:
    borrower = Borrower()
    sent, loan = lend(lender, frames_of(1))
    read = borrower.read(sent, MAX)
    clock[0] += shm.KEEP_S + 1
    lender.check()
    borrower.check()
    assert not loan.slot.is_back(loan.number), "somebody looks at it"
    del read
    borrower.give_back()
    for side in (lender, borrower):
        side.check()
    assert not lender._slots
    assert not borrower._seen


def test_who_comes_too_late_finds_nothing(lender: Lender, clock: list[float]) -> None:
    sent, _ = lend(lender, frames_of(1))
    clock[0] += shm.PATIENCE_S + 1
    lender.check()
    assert Borrower().read(sent, MAX) is None
    lend(lender, frames_of(2))
    assert Borrower().read(sent, MAX) is None, "the descriptor is another slot's now"


def test_a_peer_that_is_away_is_no_reason_to_stop_lending(
    lender: Lender, clock: list[float]
) -> None:
    for _ in range(2):
        lend(lender, frames_of(1))
        clock[0] += shm.PATIENCE_S + 1
        lender.check()
    assert lender.lend(frames_of(1), RECEIVER) is not None


def test_to_who_finds_nothing_messages_are_sent_for_a_while(
    lender: Lender, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """To that one alone."""
    _, loan = lend(lender, frames_of(1))
    lender.missed(RECEIVER)
    assert loan.slot.is_back(loan.number)
    assert lender.lend(frames_of(1), RECEIVER) is None
    assert lender.lend(frames_of(1), OTHER) is not None
    assert "server-0" in caplog.text
    clock[0] += shm.PAUSE_S
    lender.check()
    assert lender.lend(frames_of(1), RECEIVER) is not None


def test_what_is_looked_for_only_when_it_was_given_up_counts_as_well(
    lender: Lender, clock: list[float]
) -> None:
    """A receiver that needs longer than slots are kept for must get its messages in another way."""
    sent, _ = lend(lender, frames_of(1))
    clock[0] += shm.PATIENCE_S + 1
    lender.check()
    assert Borrower().read(sent, MAX) is None
    lender.missed(RECEIVER)
    assert lender.lend(frames_of(1), RECEIVER) is None


def test_who_had_a_slot_before_others_lets_it_go_in_the_end(
    lender: Lender, clock: list[float]
) -> None:
    borrowers = [Borrower(), Borrower()]
    for borrower in borrowers:
        sent, loan = lend(lender, frames_of(1))
        assert borrower.read(sent, MAX) is not None
        borrower.give_back()
        assert loan.slot.is_back(loan.number)
    clock[0] += 2 * shm.PATIENCE_S + 1
    for borrower in borrowers:
        borrower.check()
        assert not borrower._seen


def give_back(loan: shm.Loan) -> None:
    loan.slot.notes[shm._RETURNED] = loan.number


def test_there_is_a_limit_to_what_is_lent(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "BYTES_MAX", 4 * LARGE - 1)
    loans = [lend(lender, frames_of(1))[1] for _ in range(3)]
    assert lender.lend(frames_of(1), RECEIVER) is None
    give_back(loans[0])
    assert lender.lend(frames_of(1), RECEIVER) is not None
    give_back(loans[1])
    give_back(loans[2])
    assert lender.lend(frames_of(1, 3 * LARGE), RECEIVER) is None, "two of them are in use"


def test_processes_that_are_forked_off_do_not_keep_the_memory(lender: Lender) -> None:
    _, loan = lend(lender, frames_of(1))
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        found = os.path.exists(f"/proc/self/fd/{loan.slot.fd}")
        maps = Path("/proc/self/maps").read_text()
        os.write(writer, b"kept" if found or "memfd:dlctl" in maps else b"free")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 10) == b"free"
    assert "memfd:dlctl" in Path("/proc/self/maps").read_text()
    os.close(reader)
    os.close(writer)


def test_the_memory_of_a_sender_that_is_killed_stays_with_who_reads_it() -> None:
    code = (
        "import sys, numpy\n"
        "from daemons.transport.shm import Lender, LARGE\n"
        "lender = Lender()\n"
        "sent, _ = lender.lend([b'', bytes([7]) * LARGE], 0)\n"
        "sys.stdout.buffer.write(sent[0] + sent[1])\n"
        "sys.stdout.flush()\n"
        "sys.stdin.read()\n"
    ).replace("LARGE", "FRAME_BYTES_MIN")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        head = process.stdout.read(shm._HEAD.size)
        sent: Frames = [head, process.stdout.read(16), b"", b""]
        borrower = Borrower()
        read = borrower.read(sent, MAX)
        process.kill()
    assert read is not None
    assert set(bytes(read[1])) == {7}
    assert Borrower().read(sent, MAX) is None
    del read
    borrower.give_back()


def test_nobody_can_take_the_memory_away_under_a_reader(lender: Lender) -> None:
    _, loan = lend(lender, frames_of(1))
    with pytest.raises(PermissionError):
        os.ftruncate(loan.slot.fd, 0)


def test_a_file_that_is_no_slot_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    pipe = os.pipe()
    with path.open("r+b") as file:
        for fd in (file.fileno(), *pipe, 999_999):
            head = shm._HEAD.pack(shm.SHARED, os.getpid(), fd, bytes(16), 1, False)
            sent: Frames = [head, LARGE.to_bytes(8, "little"), b""]
            assert Borrower().read(sent, MAX) is None
    for end in pipe:
        os.close(end)


def test_a_loan_of_before_is_refused(lender: Lender) -> None:
    borrower = Borrower()
    sent, _ = lend(lender, frames_of(1))
    assert borrower.read(sent, MAX) is not None
    with pytest.raises(RemoteProtocolError):
        borrower.read(sent, MAX)


def test_a_loan_that_is_too_large_is_refused(lender: Lender) -> None:
    with pytest.raises(RemoteProtocolError, match=" 1000"):
        Borrower().read(lend(lender, frames_of(1))[0], 1000)


@times(2)
@given(
    st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**64 - 1)),
    st.integers(0, 60), st.booleans(), st.booleans(),
)  # fmt: skip
def test_what_nobody_would_lend_is_refused_or_not_found(
    number: int, fd: int, lengths: list[int], cut_off: int, is_ours: bool, is_kept: bool
) -> None:
    lender = Lender()
    try:
        sent, loan = lend(lender, frames_of(1))
        cookie = loan.slot.cookie if is_ours else secrets.token_bytes(16)
        fd = loan.slot.fd if is_ours else fd
        head = shm._HEAD.pack(shm.SHARED, os.getpid(), fd, cookie, number, is_kept)
        packed = b"".join(length.to_bytes(8, "little") for length in lengths)
        frames = [b""] * len(lengths)
        try:
            read = Borrower().read([head[: len(head) - cut_off % 3], packed, *frames], MAX)
        except RemoteProtocolError:
            return
        assert read is None or sum(map(len, read)) <= loan.slot.nbytes
        assert len(sent) == 5
    finally:
        lender.close()


def test_between_two_ends_of_a_unix_socket_a_shard_is_not_sent(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(1_000_000).astype(np.float32)
    here, there = Transport(zmq.Poller()), Transport(zmq.Poller())
    try:
        there.connect("server-0", here.listen(f"ipc://{tmp_path}/socket"))
        there.send("server-0", m.Initialise(0, 1, values, values[:0]))
        peer, came = next_message(here)
        assert isinstance(came, m.Initialise)
        assert np.array_equal(came.values, values)
        assert len(there.bulk.lender._slots) == 1
        shard = values.copy()
        here.send(peer, m.Parameters(0, 1, 1, 1, shard))
        shard[:] = 0  # The next update: what was sent is a copy.
        _, answer = next_message(there)
        assert isinstance(answer, m.Parameters)
        assert np.array_equal(answer.values, values)
    finally:
        here.close()
        there.close()


def test_where_proc_is_closed_one_message_is_lost_and_then_all_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    values = np.ones(LARGE, np.float32)
    here, there = Transport(zmq.Poller()), Transport(zmq.Poller())
    monkeypatch.setattr(shm, "_open", lambda pid, fd, cookie: None)
    try:
        there.connect("server-0", here.listen(f"ipc://{tmp_path}/socket"))
        message, came = m.Initialise(0, 1, values, values[:0]), list[m.Message]()

        def serve() -> None:
            for transport in (here, there):
                for source, _ in transport.poller.poll(50):
                    came.extend(event.message for event in transport.receive(source))

        deadline = time.monotonic() + COME_S
        there.send("server-0", message)
        while not there.bulk.lender._missed:
            assert time.monotonic() < deadline
            serve()
        assert not came
        there.send("server-0", message)
        while not came:
            assert time.monotonic() < deadline
            serve()
        assert isinstance(came[0], m.Initialise)
        assert np.array_equal(came[0].values, values)
        assert "server-0" in caplog.text
    finally:
        here.close()
        there.close()


def test_over_tcp_nothing_is_lent_and_loans_are_refused(
    lender: Lender, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = Transport(zmq.Poller()), Transport(zmq.Poller())
    try:
        there.connect("server-0", here.listen("tcp://127.0.0.1:*"))
        sent, _ = lend(lender, frames_of(1))
        socket = there._dealers["server-0"]
        socket.send_multipart([bytes(frame) for frame in sent])
        there.send("server-0", m.Initialise(0, 1, np.zeros(LARGE), np.zeros(0)))
        _, came = next_message(here)
        assert isinstance(came, m.Initialise)
        assert caplog.text.count("refused a message") == 1
        assert not there.bulk.lender._slots
    finally:
        here.close()
        there.close()


def next_message(transport: Transport) -> tuple[object, m.Message]:
    deadline = time.monotonic() + COME_S
    while time.monotonic() < deadline:
        for source, _ in transport.poller.poll(100):
            for came in transport.receive(source):
                return came.peer, came.message
    pytest.fail("no message came")
