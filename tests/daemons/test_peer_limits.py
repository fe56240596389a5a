"""What one peer can take from the others: bytes, turns, file descriptors. Real sockets."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
from guarded_port import COME_S, GUEST, HEARD, HERE, KEYS, House, finds_the_house_open, guest

from daemons.transport import backpressure, connection_limit
from daemons.transport.connections import address, connection, owner
from daemons.transport.sockets import Transport
from dlctl.roles.protocol.context import Context
from dlctl.roles.server.abuse_guard import USELESS_MAX, WINDOW_S, AbuseGuard
from dlctl.wire import codec
from dlctl.wire import messages as m
from dlctl.wire.machine import Mute

OTHER = "worker-1"
ANSWER_BYTES = 4 << 20
ANSWERS = 200
COMEBACKS = 12
"""Connections of one key, each of which asks for two shards of `SHARD_BYTES`."""
SHARD_BYTES = 8 << 20
SMALL_BYTES = 60_000
SLACK_BYTES = 48 << 20
"""What libzmq and the kernel hold themselves."""
CROWD = 10_000
EVENTS_KEPT = 2000
"""Of a socket by libzmq, unless it is told otherwise."""
COMERS = """
import socket, sys
port, count = int(sys.argv[1]), int(sys.argv[2])
held = []
for _ in range(count):
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex(("127.0.0.1", port))
    held.append(one)
print(len(held), flush=True)
sys.stdin.read()
"""


class Ledger(backpressure.Backpressure):
    """Knows how many messages were dropped and followed."""

    dropped, followed = 0, 0

    def has_space(self, peer: bytes, nbytes: int) -> bool:
        fits = super().has_space(peer, nbytes)
        self.dropped += not fits
        return fits

    def add(self, peer: bytes, tracker: backpressure.Tracker, nbytes: int) -> None:
        self.followed += 1
        super().add(peer, tracker, nbytes)


@pytest.fixture
def house() -> Iterator[House]:
    made = House({KEYS.public(GUEST): GUEST, KEYS.public(OTHER): OTHER})
    made.transport.unread = Ledger()
    yield made
    made.transport.close()


@contextmanager
def deaf(house: House) -> Iterator[bytes]:
    """A guest that asks once and then never reads; yields what the house calls its connection."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvhwm = 0, 1
        dealer.curve_serverkey = KEYS.public(HERE).encode()
        dealer.curve_publickey, dealer.curve_secretkey = (k.encode() for k in KEYS.pair(GUEST))
        dealer.connect(house.address)
        dealer.send_multipart(codec.encode(HEARD))
        yield house.comes(COME_S)


# ---------------------------------------------------------------- who does not read


def test_what_a_peer_does_not_read_is_dropped_and_the_others_are_served(house: House) -> None:
    """Of 800 MB that are meant for it at most the budget waits for it."""
    rss = psutil.Process().memory_info().rss
    with deaf(house) as peer:
        for number in range(ANSWERS):
            values = np.zeros(ANSWER_BYTES // 4, np.float32)
            house.transport.send(peer, m.Parameters(0, 1, number, 0, values))
        grown = psutil.Process().memory_info().rss - rss
        assert grown < backpressure.BYTES_MAX + SLACK_BYTES
        assert house.transport.unread.dropped > ANSWERS // 2
        with guest(house, OTHER) as transport:
            transport.send(HERE, HEARD)
            there = house.comes(COME_S)
            house.transport.send(there, m.Parameters(0, 1, 1, 0, np.ones(ANSWER_BYTES // 4, "f4")))
            assert house.is_heard_by(transport, COME_S)
    house.until(lambda: not house.transport.unread._waiting, 3 * COME_S)


def test_who_connects_again_and_again_gets_no_more_than_one_connection_would(house: House) -> None:
    """Its key is what counts; another key is served meanwhile."""
    values = np.zeros(SHARD_BYTES // 4, np.float32)
    rss, sent = psutil.Process().memory_info().rss, 2 * COMEBACKS
    with ExitStack() as connections:
        for _ in range(COMEBACKS):
            peer = connections.enter_context(deaf(house))
            for number in range(2):
                house.transport.send(peer, m.Parameters(0, 1, number, 0, values))
        grown = psutil.Process().memory_info().rss - rss
        assert grown < backpressure.BYTES_MAX + SLACK_BYTES
        most_in_the_kernel = 3 * SHARD_BYTES
        delivered = sent - house.transport.unread.dropped
        assert delivered * SHARD_BYTES <= backpressure.BYTES_MAX + most_in_the_kernel
        with guest(house, OTHER) as transport:
            transport.send(HERE, HEARD)
            house.transport.send(house.comes(COME_S), m.Parameters(0, 1, 1, 0, values))
            assert house.is_heard_by(transport, COME_S)
    house.until(lambda: not house.transport.unread._waiting, 3 * COME_S)


def test_one_connection_that_does_not_read_is_no_harm_to_the_next_one_of_its_key(
    house: House,
) -> None:
    """What has been read is not counted, whichever connection it went over and when."""
    values = np.zeros(ANSWER_BYTES // 4, np.float32)
    with deaf(house) as stuck, guest(house) as transport:
        house.transport.send(stuck, m.Parameters(0, 1, 0, 0, values))
        transport.send(HERE, HEARD)
        peer = house.comes(COME_S)
        for number in range(20):
            house.transport.send(peer, m.Parameters(0, 1, number, 0, values))
            assert house.is_heard_by(transport, COME_S)
    assert house.transport.unread.dropped == 0


def test_small_answers_that_nobody_reads_are_dropped_over_all_connections_of_a_key(
    house: House,
) -> None:
    """Without a limit it would be 240 MB: libzmq keeps a thousand for each connection."""
    values = np.zeros(SMALL_BYTES // 4, np.float32)
    rss = psutil.Process().memory_info().rss
    with ExitStack() as stuck:
        for _ in range(4):
            peer = stuck.enter_context(deaf(house))
            for number in range(1000):
                house.transport.send(peer, m.Parameters(0, 1, number, 0, values))
        grown = psutil.Process().memory_info().rss - rss
        assert grown < backpressure.SMALL_BYTES_MAX + SLACK_BYTES
        assert house.transport.unread.dropped > 2000
        with guest(house, OTHER) as transport:
            transport.send(HERE, HEARD)
            house.transport.send(house.comes(COME_S), HEARD)
            assert house.is_heard_by(transport, COME_S)
    house.until(lambda: not house.transport.unread._waiting, 3 * COME_S)


def test_one_that_reads_gets_all_small_answers_and_few_of_them_are_followed(house: House) -> None:
    with guest(house) as transport:
        transport.send(HERE, HEARD)
        peer = house.comes(COME_S)
        house.transport.unread = ledger = Ledger()
        for _ in range(1000):
            house.transport.send(peer, HEARD)
            assert house.is_heard_by(transport, COME_S)
    assert 1 <= ledger.followed < 10
    assert ledger.dropped == 0


def test_what_is_not_followed_counts_with_the_next_message_that_is() -> None:
    waiting, peer = backpressure.Backpressure(), connection(GUEST, b"one")
    small = [bytes(1000)]
    first = waiting.counts(peer, small)
    assert first > backpressure.STRETCH_BYTES, "as much may have gone there before"
    followed, sent = 0, 0
    for _ in range(1000):
        if nbytes := waiting.counts(peer, small):
            waiting.add(peer, zmq.MessageTracker(threading.Event()), nbytes)
            followed += nbytes
        sent += 1000
    assert sent - backpressure.STRETCH_BYTES < followed < 1.5 * sent


def test_a_large_answer_on_a_slow_link_keeps_no_small_ones_back() -> None:
    waiting, peer = backpressure.Backpressure(), connection(GUEST, b"one")
    for _ in range(backpressure.MESSAGES_FREE):
        waiting.add(peer, zmq.MessageTracker(threading.Event()), backpressure.BYTES_MAX)
    assert not waiting.has_space(peer, backpressure.LARGE_BYTES)
    assert waiting.has_space(peer, 1000)
    waiting.add(peer, zmq.MessageTracker(threading.Event()), backpressure.SMALL_BYTES_MAX // 100)
    for _ in range(200):
        if waiting.has_space(peer, backpressure.SMALL_BYTES_MAX // 100):
            tracker = zmq.MessageTracker(threading.Event())
            waiting.add(peer, tracker, backpressure.SMALL_BYTES_MAX // 100)
    assert not waiting.has_space(peer, backpressure.SMALL_BYTES_MAX // 100)


def test_small_messages_count_their_bytes_however_slowly_they_leave() -> None:
    waiting, peer, frames = backpressure.Backpressure(), connection(GUEST, b"\0peer"), [bytes(200)]
    for _ in range(10_000):  # One a second, behind a large one on a slow link.
        waiting.check()
        if nbytes := waiting.counts(peer, frames):
            assert waiting.has_space(peer, nbytes)
            waiting.add(peer, zmq.MessageTracker(threading.Event()), nbytes)


def test_without_keys_each_connection_is_counted_by_itself(tmp_path: Path) -> None:
    """Over unix sockets only this user comes."""
    here, there = Transport(zmq.Poller()), Transport(zmq.Poller())
    try:
        address = here.listen(f"ipc://{tmp_path}/socket")
        peers: set[bytes] = set()
        for name in ("first", "second"):
            there.connect(name, address)
            there.send(name, HEARD)
        deadline = time.monotonic() + COME_S
        while len(peers) < 2:
            assert time.monotonic() < deadline
            for source, _ in here.poller.poll(100):
                peers |= {came.peer for came in here.receive(source)}  # type: ignore[misc]
        first, second = peers
        for _ in range(backpressure.MESSAGES_FREE):
            here.unread.add(first, zmq.MessageTracker(threading.Event()), backpressure.BYTES_MAX)
        assert not here.unread.has_space(first, backpressure.LARGE_BYTES)
        assert here.unread.has_space(second, backpressure.LARGE_BYTES)
    finally:
        here.close()
        there.close()


def test_one_that_reads_gets_everything_however_much_it_is(house: House) -> None:
    with guest(house) as transport:
        transport.send(HERE, HEARD)
        peer = house.comes(COME_S)
        for number in range(40):
            values = np.zeros(ANSWER_BYTES // 4, np.float32)
            house.transport.send(peer, m.Parameters(0, 1, number, 0, values))
            assert house.is_heard_by(transport, COME_S)
    assert house.transport.unread.dropped == 0


def test_two_answers_may_wait_however_large_they_are() -> None:
    waiting = backpressure.Backpressure()
    routes = [b"\0peer", b"\0again"]
    for route in routes:
        peer = connection(GUEST, route)
        assert waiting.has_space(peer, backpressure.BYTES_MAX * 10)
        waiting.add(peer, zmq.MessageTracker(threading.Event()), backpressure.BYTES_MAX * 10)
    assert not waiting.has_space(connection(GUEST, b"\0and again"), backpressure.LARGE_BYTES)
    assert waiting.has_space(connection(OTHER, routes[0]), backpressure.LARGE_BYTES)


@pytest.mark.parametrize("route", [b"\0\x80\0\0\1", b"worker-1", b"worker-1\0", b"\0"])
@pytest.mark.parametrize("name", [GUEST, ""])
def test_whatever_a_connection_is_called_its_answers_go_there_and_are_its_owners(
    route: bytes, name: str
) -> None:
    peer = connection(name, route)
    assert address(peer) == [route]
    assert owner(peer) == (name.encode() or peer)
    assert address(HERE) == []


# ---------------------------------------------------------------- who repeats itself


def test_a_flood_of_useless_messages_is_put_up_with_for_a_while_and_then_not_heard() -> None:
    context, now = Context(1.0), 0.0
    waste = AbuseGuard(context)
    for _ in range(10 * USELESS_MAX):
        now += 0.5 * WINDOW_S / USELESS_MAX  # twice as fast as is tolerated
        waste.add(GUEST, now)
    effects = context.clear()
    assert any(isinstance(effect, Mute) and effect.name == GUEST for effect in effects)
    said = [effect for effect in effects if not isinstance(effect, Mute)]
    assert len(said) == 5, "a line per window"


def test_honest_repetition_is_never_too_much() -> None:
    """A window of pushes again every second, for hours; and all at once after a long absence."""
    context = Context(1.0)
    waste = AbuseGuard(context)
    for second in range(10_000):
        for _ in range(16):
            waste.add(GUEST, float(second))
    for _ in range(500):
        waste.add(OTHER, 1.0)
    assert context.clear() == []


def test_who_is_hushed_is_not_heard_and_the_others_are_and_it_is_heard_again(house: House) -> None:
    with guest(house) as flood, guest(house, OTHER) as other:
        house.transport.mute(GUEST, 1.0)
        for _ in range(50):
            flood.send(HERE, HEARD)
        other.send(HERE, HEARD)
        assert house.hears(COME_S) == [(HEARD, OTHER)]
        assert house.hears(1.2) == []
        flood.send(HERE, HEARD)
        assert house.hears(COME_S) == [(HEARD, GUEST)]


# ---------------------------------------------------------------- who only stands there


@contextmanager
def comers(port: int, count: int) -> Iterator[None]:
    """So many connections that say nothing, of another process."""
    words = [sys.executable, "-c", COMERS, str(port), str(count)]
    allow = max(count + 100, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    with subprocess.Popen(
        words, stdin=-1, stdout=-1, text=True,
        preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_NOFILE,
            (allow, max(allow, resource.getrlimit(resource.RLIMIT_NOFILE)[1])),
        ),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            assert int(process.stdout.readline()) == count
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("limit", [120])
def test_before_a_crowd_the_door_is_shut_and_opens_again(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(connection_limit, "CONNECTIONS_MAX", connection_limit.descriptors() + limit)
    assert limit > connection_limit.GUESTS_MIN
    house = House({KEYS.public(GUEST): GUEST, KEYS.public(OTHER): OTHER})
    try:
        with guest(house) as inside, ExitStack() as idle:
            inside.send(HERE, HEARD)
            assert house.hears(COME_S) == [(HEARD, GUEST)]
            for _ in range(limit):
                one = idle.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", house.port))
            house.until(lambda: house.transport.crowd.is_shut, COME_S)
            inside.send(HERE, HEARD)
            assert house.hears(COME_S) == [(HEARD, GUEST)], "who is in is not touched"
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", house.port), timeout=0.5)
        house.until(lambda: not house.transport.crowd.is_shut, COME_S)
        assert finds_the_house_open(house)
    finally:
        house.transport.close()


@pytest.mark.long
def test_ten_thousand_idle_connections_leave_descriptors_and_let_guests_in(house: House) -> None:
    """As many as the limit of this machine allows; they are put out after the handshake's time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(CROWD, hard - 200)
    rss, most = psutil.Process().memory_info().rss, 0
    with guest(house) as inside, comers(house.port, count):
        inside.send(HERE, HEARD)
        assert (HEARD, GUEST) in house.hears(COME_S)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            house.hears(0.05)
            house.transport.check()
            most = max(most, connection_limit.descriptors())
        with open(os.devnull) as file:
            assert file.fileno() < soft
        assert most < soft
        assert psutil.Process().memory_info().rss - rss < 400 << 20
        assert finds_the_house_open(house, 3 * COME_S)


DEAF_HOUSE = """
from guarded_port import GUEST, KEYS, House
from daemons.transport import connection_limit
connection_limit.raise_limit()
house = House({KEYS.public(GUEST): GUEST})
print(house.port, flush=True)
input()
house.transport.close()
print("closed")
"""


def test_a_house_that_is_too_busy_to_see_who_comes_can_close() -> None:
    """More come and go than libzmq keeps events of by itself."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-c", DEAF_HOUSE]
    with subprocess.Popen(words, stdin=-1, stdout=-1, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            place = ("127.0.0.1", int(process.stdout.readline()))
            for _ in range(EVENTS_KEPT + 100):
                socket.create_connection(place, timeout=COME_S).close()
            out, _ = process.communicate("\n", timeout=COME_S)
            assert out == "closed\n"
        finally:
            process.kill()
