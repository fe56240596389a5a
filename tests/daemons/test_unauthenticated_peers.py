"""What strangers find who come to a daemon's TCP port: nobody. Real sockets, real handshakes."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import zmq
from guarded_port import COME_S, GUEST, HEARD, HERE, KEYS, House, finds_the_house_open, guest

from daemons.transport import connections, reconnect, zap
from daemons.transport.sockets import Transport
from dlctl.errors import LocalProtocolError
from dlctl.wire import codec
from dlctl.wire import messages as m

STRANGER = "worker-9"
SILENCE_S = 0.5
IDLE = 400


@contextmanager
def place() -> Iterator[int]:
    """A port of ours at which nobody listens yet."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def introduce(dealer: zmq.Socket[bytes], name: str) -> None:
    """Give a socket the keys of `name`."""
    dealer.curve_serverkey = KEYS.public(HERE).encode()
    dealer.curve_publickey, dealer.curve_secretkey = (k.encode() for k in KEYS.pair(name))


# ---------------------------------------------------------------- who gets in


def test_a_guest_is_heard_under_the_name_of_its_key(house):
    assert finds_the_house_open(house)


def test_who_has_no_key_gets_nowhere():
    """Its words wait before there is a door: of one who is refused libzmq takes none any more."""
    with place() as port, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        refusals = dealer.get_monitor_socket(zmq.Event.HANDSHAKE_FAILED_PROTOCOL)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send_multipart(codec.encode(HEARD))
        house = House({KEYS.public(GUEST): GUEST}, f"tcp://127.0.0.1:{port}")
        try:
            assert refusals.poll(COME_S * 1000), "it has come to the door"
            assert house.hears(SILENCE_S) == []
            assert finds_the_house_open(house)
        finally:
            house.transport.close()
            dealer.disable_monitor()
            refusals.close()


def test_who_comes_before_it_is_said_who_may_come_is_in_as_soon_as_that_is_said():
    """It waits at the door: to send it away, and have it come again, takes three seconds."""
    house = House(None)
    try:
        with guest(house) as transport:
            socket = transport._dealers[HERE]
            transport.send(HERE, HEARD)
            assert house.hears(SILENCE_S) == []
            house.transport.admit({KEYS.public(GUEST): GUEST})
            assert house.hears(2.0) == [(HEARD, GUEST)]
            assert house.transport.gatekeeper.refused == 0
            assert transport._dealers[HERE] is socket
    finally:
        house.transport.close()


def test_who_comes_much_earlier_than_that_comes_again_and_is_not_kept(monkeypatch):
    """What waits at the door takes memory."""
    monkeypatch.setattr(zap, "UNDECIDED_S", 0.1)
    house = House(None)
    try:
        with guest(house) as transport:
            house.until(lambda: house.transport.gatekeeper.refused > 0, COME_S)
            house.transport.admit({KEYS.public(GUEST): GUEST})

            def is_heard() -> bool:
                transport.send(HERE, HEARD)
                return (HEARD, GUEST) in house.hears(0.1)

            look_until(transport, is_heard)
    finally:
        house.transport.close()


@pytest.mark.long
def test_a_key_that_comes_again_and_again_waits_and_the_others_do_not(monkeypatch, caplog):
    monkeypatch.setattr(zap, "COMINGS_MAX", 5.0)
    monkeypatch.setattr(zap, "COMINGS_PER_S", 1.0)
    house = House({KEYS.public(GUEST): GUEST, KEYS.public(STRANGER): STRANGER})
    try:
        with caplog.at_level(logging.WARNING), ExitStack() as many:
            for _ in range(20):
                many.enter_context(guest(house)).send(HERE, HEARD)
            house.until(lambda: house.transport.gatekeeper.refused > 0, COME_S)
            assert caplog.text.count(f"connection of {GUEST}: ") == 1
            with guest(house, STRANGER) as other:
                other.send(HERE, m.Drained(STRANGER))
                heard = house.hears(COME_S, 6)
                assert (m.Drained(STRANGER), STRANGER) in heard
        assert finds_the_house_open(house), "it has only to wait"
    finally:
        house.transport.close()


def test_a_key_may_come_so_often_at_once_and_so_often_in_the_long_run(house):
    takes = house.transport.gatekeeper._takes
    most = int(zap.COMINGS_MAX)
    assert [takes(b"worker-0", 0.0) for _ in range(2 * most)].count(True) == most
    assert takes(b"worker-1", 0.0)
    times = [step / 100 for step in range(1, 10_001)]
    late = [takes(b"worker-0", now) for now in times].count(True)
    assert late == pytest.approx(100.0 * zap.COMINGS_PER_S, rel=0.01)


@pytest.mark.parametrize("who", [GUEST, STRANGER])
def test_who_calls_itself_as_another_connection_is_called_gets_nothing_of_it(who):
    """A key's own connections are no exception."""
    house = House({KEYS.public(GUEST): GUEST, KEYS.public(STRANGER): STRANGER})
    try:
        with guest(house) as transport, zmq.Context() as context:
            transport.send(HERE, HEARD)
            peer = house.comes(COME_S)
            with context.socket(zmq.DEALER) as dealer:
                dealer.linger, [dealer.routing_id] = 0, connections.address(peer)
                introduce(dealer, who)
                dealer.connect(house.address)
                for _ in range(3):
                    dealer.send_multipart(codec.encode(m.Drained(who)))
                assert house.hears(SILENCE_S) == [], "it is not heard, either"
                house.transport.send(peer, HEARD)
                assert house.is_heard_by(transport, COME_S)
                assert not dealer.poll(SILENCE_S * 1000)
                transport.send(HERE, HEARD)
                assert house.hears(COME_S) == [(HEARD, GUEST)]
    finally:
        house.transport.close()


def test_an_unknown_key_gets_nowhere_and_is_told_once(house, caplog):
    with caplog.at_level(logging.WARNING), ExitStack() as strangers:
        for _ in range(5):
            strangers.enter_context(guest(house, STRANGER)).send(HERE, HEARD)
        assert house.hears(SILENCE_S) == []
        assert house.transport.gatekeeper.refused >= 5
        assert caplog.text.count("127.0.0.1") == 1
        assert finds_the_house_open(house)


def test_a_key_is_known_from_the_moment_that_it_is_admitted(house):
    with guest(house, STRANGER) as transport:
        transport.send(HERE, HEARD)
        assert house.hears(SILENCE_S) == []
        house.transport.admit({KEYS.public(STRANGER): STRANGER})
        look_until(transport, lambda: house.transport.gatekeeper.refused > 0)

        def is_heard() -> bool:
            transport.send(HERE, HEARD)
            return (HEARD, STRANGER) in house.hears(0.1)

        look_until(transport, is_heard)


@pytest.mark.parametrize("names", [None, {}])
def test_without_a_word_of_who_may_come_nobody_does(names):
    house = House(names)
    try:
        with guest(house) as transport:
            transport.send(HERE, HEARD)
            assert house.hears(SILENCE_S) == []
    finally:
        house.transport.close()


def test_a_listener_with_another_key_than_it_should_is_not_spoken_to_and_named(
    house, caplog, monkeypatch
):
    monkeypatch.setattr(reconnect, "SAY_S", 0.3)
    with caplog.at_level(logging.WARNING), guest(house, server="server-1") as transport:
        transport.send(HERE, HEARD)
        look_until(transport, lambda: "refused every connection" in caplog.text)
        assert f"{HERE} at {house.address}" in caplog.text
        assert "key" in caplog.text
        assert house.hears(0.1) == []


def test_a_guest_who_is_not_known_is_told_so(house, caplog, monkeypatch):
    monkeypatch.setattr(reconnect, "SAY_S", 0.3)
    with caplog.at_level(logging.WARNING), guest(house, STRANGER) as transport:
        look_until(transport, lambda: "does not know this daemon's key" in caplog.text)


def look_until(transport: Transport, seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + COME_S
    while not seen():
        assert time.monotonic() < deadline, "it never said so"
        transport.check()  # As the loop does every second.
        for source, _ in transport.poller.poll(100):
            list(transport.receive(source))


def test_a_guest_who_comes_too_often_is_told_so_and_comes_again(house, caplog, monkeypatch):
    monkeypatch.setattr(reconnect, "SAY_S", 0.3)
    monkeypatch.setattr(zap, "COMINGS_MAX", 0.0)
    monkeypatch.setattr(zap, "COMINGS_PER_S", 0.0)
    with caplog.at_level(logging.WARNING), guest(house) as transport:
        look_until(transport, lambda: "too many connections with this daemon's key" in caplog.text)
        assert "does not know this daemon's key" not in caplog.text
        monkeypatch.setattr(zap, "COMINGS_MAX", 9.0)
        monkeypatch.setattr(zap, "COMINGS_PER_S", 9.0)

        def is_heard() -> bool:
            transport.send(HERE, HEARD)
            return (HEARD, GUEST) in house.hears(0.1)

        look_until(transport, is_heard)


def test_an_end_with_a_key_does_not_speak_to_one_without():
    transport = Transport(zmq.Poller())
    with pytest.raises(LocalProtocolError):
        transport.connect(HERE, "tcp://127.0.0.1:9", KEYS.public(HERE))
    transport.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_if_the_gatekeeper_is_gone_the_daemon_ends_and_nobody_gets_in(house, monkeypatch):
    def fail(*_: object) -> bool:
        raise ZeroDivisionError

    house.transport.check()
    monkeypatch.setattr(zap.Gatekeeper, "_takes", fail)
    with guest(house) as transport:
        transport.send(HERE, HEARD)
        with pytest.raises(RuntimeError):
            house.until(lambda: False, COME_S)
    with guest(house) as transport:
        transport.send(HERE, HEARD)
        assert house.hears(SILENCE_S) == []


# ---------------------------------------------------------------- what is no handshake at all

GREETING = b"\xff" + 8 * b"\x00" + b"\x7f\x03\x00CURVE".ljust(55, b"\x00")
NOISE = {
    "a browser": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a TLS client": bytes.fromhex("16030100c8010000c40303") + bytes(197),
    "noise": bytes(range(256)) * 64,
    "nothing": b"",
    "an older protocol": b"\x01\x00",
    "half a handshake": GREETING,
    "a greeting and noise": GREETING + b"\x04\xff" + bytes(300),
    "a huge command": GREETING + b"\x06" + b"\x7f" + 7 * b"\xff",
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE.keys())
def test_noise_disturbs_nobody(house, noise):
    with socket.create_connection(("127.0.0.1", house.port)) as stranger:
        stranger.sendall(noise)
        assert finds_the_house_open(house)
        assert house.hears(0.05) == []


def test_half_a_handshake_is_given_up(house):
    with socket.create_connection(("127.0.0.1", house.port), timeout=COME_S) as stranger:
        stranger.sendall(GREETING)
        began_at = time.monotonic()
        while stranger.recv(4096):
            pass
    assert time.monotonic() - began_at < 2 * 3.0


def test_hundreds_of_idle_connections_keep_nobody_out(house):
    with ExitStack() as idle:
        for _ in range(IDLE):
            idle.enter_context(socket.create_connection(("127.0.0.1", house.port)))
        assert finds_the_house_open(house)


# ---------------------------------------------------------------- a guest that misbehaves


def test_a_frame_that_is_too_large_costs_its_sender_the_connection():
    house = House({KEYS.public(GUEST): GUEST}, frame_bytes_max=1000)
    try:
        with guest(house) as transport:
            transport.send(HERE, m.Failed(GUEST, "x" * 2000, "", False))
            assert house.hears(SILENCE_S) == []
        assert finds_the_house_open(house)
    finally:
        house.transport.close()


def test_a_message_of_a_hundred_thousand_frames_is_read_and_thrown_away(house, caplog):
    import psutil

    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        introduce(dealer, GUEST)
        dealer.connect(house.address)
        before = psutil.Process().memory_info().rss
        sender = threading.Thread(target=dealer.send_multipart, args=([b""] * 100_000,))
        sender.start()
        dealer_done = house.hears(2.0)
        sender.join()
        dealer.send_multipart(codec.encode(HEARD))
        assert dealer_done == []
        assert house.hears(COME_S) == [(HEARD, GUEST)]
        assert caplog.text.count(f"message of {GUEST}") == 1
        assert psutil.Process().memory_info().rss - before < 64 << 20


def test_what_is_not_ours_is_counted_with_the_name_of_its_sender(house, caplog):
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        introduce(dealer, GUEST)
        dealer.connect(house.address)
        for header in (b"\xdd\xff\xff\xff\xff", b"\x91" * 50_000, b"", os.urandom(64)):
            dealer.send_multipart([header])
        dealer.send_multipart(codec.encode(HEARD))
        assert house.hears(COME_S) == [(HEARD, GUEST)]
    assert caplog.text.count(f"message of {GUEST}") == 4
