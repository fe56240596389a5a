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
from house import COME_S, GUEST, HEARD, HERE, KEYS, House, finds_the_house_open, guest

from daemons import handshakes
from daemons.transport import Transport
from dlctl import messages as m
from dlctl import wire
from dlctl.errors import LocalProtocolError

STRANGER = "worker-9"
SILENCE_S = 0.5
IDLE = 400


@contextmanager
def plain(address: str) -> Iterator[zmq.Socket[bytes]]:
    """A connection without any key."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(address)
        yield dealer


# ---------------------------------------------------------------- who gets in


def test_a_guest_is_heard_under_the_name_of_its_key(house):
    assert finds_the_house_open(house)


def test_who_has_no_key_gets_nowhere(house):
    with plain(house.address) as dealer:
        dealer.send_multipart(wire.encode(HEARD))
        assert house.hears(SILENCE_S) == []
        assert finds_the_house_open(house)


def test_an_unknown_key_gets_nowhere_and_is_told_once(house, caplog):
    with caplog.at_level(logging.WARNING), ExitStack() as strangers:
        for _ in range(5):
            strangers.enter_context(guest(house, STRANGER)).send(HERE, HEARD)
        assert house.hears(SILENCE_S) == []
        assert house.transport.turned_away >= 5
        assert caplog.text.count("refused a connection from 127.0.0.1") == 1
        assert finds_the_house_open(house)


def test_a_key_is_known_from_the_moment_that_it_is_admitted(house):
    with guest(house, STRANGER) as transport:
        transport.send(HERE, HEARD)
        assert house.hears(SILENCE_S) == []
        house.transport.admit({KEYS.public(STRANGER): STRANGER})
        look_until(transport, lambda: house.transport.turned_away > 0)

        def is_heard() -> bool:
            transport.send(HERE, HEARD)
            return (HEARD, STRANGER) in house.hears(0.1)

        look_until(transport, is_heard)


def test_without_a_word_of_who_may_come_nobody_does():
    house = House({})
    try:
        with guest(house) as transport:
            transport.send(HERE, HEARD)
            assert house.hears(SILENCE_S) == []
    finally:
        house.transport.close()


def test_a_listener_with_another_key_than_it_should_is_not_spoken_to_and_named(
    house, caplog, monkeypatch
):
    monkeypatch.setattr(handshakes, "SAY_S", 0.3)
    with caplog.at_level(logging.WARNING), guest(house, server="server-1") as transport:
        transport.send(HERE, HEARD)
        look_until(transport, lambda: "refused every connection" in caplog.text)
        assert f"{HERE} at {house.address}" in caplog.text
        assert "another key than it should" in caplog.text
        assert house.hears(0.1) == []


def test_a_guest_who_is_not_known_is_told_so(house, caplog, monkeypatch):
    monkeypatch.setattr(handshakes, "SAY_S", 0.3)
    with caplog.at_level(logging.WARNING), guest(house, STRANGER) as transport:
        look_until(transport, lambda: "does not know our key" in caplog.text)


def look_until(transport: Transport, seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + COME_S
    while not seen():
        assert time.monotonic() < deadline, "it never said so"
        transport.check()  # As the loop does every second.
        for source, _ in transport.poller.poll(100):
            list(transport.receive(source))


def test_an_end_with_a_key_does_not_speak_to_one_without():
    transport = Transport(zmq.Poller())
    with pytest.raises(LocalProtocolError, match="only one end has a key"):
        transport.connect(HERE, "tcp://127.0.0.1:9", KEYS.public(HERE))
    transport.close()


def test_if_the_gatekeeper_is_gone_the_daemon_ends_and_nobody_gets_in(house):
    house.transport.check()
    house.transport.gatekeeper.close()
    with pytest.raises(RuntimeError, match="lets connections in has ended"):
        house.transport.check()
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


def test_a_message_of_a_hundred_thousand_frames_is_read_and_thrown_away(house):
    import psutil

    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.curve_serverkey = KEYS.public(HERE).encode()
        dealer.curve_publickey, dealer.curve_secretkey = (k.encode() for k in KEYS.pair(GUEST))
        dealer.connect(house.address)
        before = psutil.Process().memory_info().rss
        sender = threading.Thread(target=dealer.send_multipart, args=([b""] * 100_000,))
        sender.start()
        dealer_done = house.hears(2.0)
        sender.join()
        dealer.send_multipart(wire.encode(HEARD))
        assert dealer_done == []
        assert house.hears(COME_S) == [(HEARD, GUEST)]
        assert house.transport.refused == 1
        assert psutil.Process().memory_info().rss - before < 64 << 20


def test_what_is_not_ours_is_counted_with_the_name_of_its_sender(house, caplog):
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.curve_serverkey = KEYS.public(HERE).encode()
        dealer.curve_publickey, dealer.curve_secretkey = (k.encode() for k in KEYS.pair(GUEST))
        dealer.connect(house.address)
        for header in (b"\xdd\xff\xff\xff\xff", b"\x91" * 50_000, b"", os.urandom(64)):
            dealer.send_multipart([header])
        dealer.send_multipart(wire.encode(HEARD))
        assert house.hears(COME_S) == [(HEARD, GUEST)]
    assert house.transport.refused == 4
    assert caplog.text.count(f"refused a message of {GUEST}") == 4
