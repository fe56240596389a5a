"""Connections that break in the wrong moment, or carry what nobody has sent: the next one is as
good as new. Real sockets, with a proxy between them.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import zmq
from guarded_port import COME_S, GUEST, HEARD, HERE, KEYS, House, guest
from proxies import Change, Proxy, cut_in_the_middle
from zmq.utils.monitor import recv_monitor_message

from daemons.loop import Loop
from daemons.transport import reconnect
from daemons.transport.reconnect import Handshakes, ReconnectingSocket
from daemons.transport.sockets import Transport
from dlctl.wire import messages as m
from dlctl.wire.machine import Connect, Effect, Event, Exit, Peer, Reconnected, Send, Started

LONG_FRAME = b"\x02" + 5 * b"\0"
"""How a frame of more than 255 bytes, and less than 16 MB, begins: its length follows."""


@contextmanager
def between(house: House, change: Change) -> Iterator[Proxy]:
    proxy = Proxy(house.port, change)
    try:
        yield proxy
    finally:
        proxy.close()


class Flip:
    """Turns one bit over, once, in something large that goes in one direction."""

    def __init__(self, up: bool, place: Callable[[bytes], int], mask: int) -> None:
        self.is_due = False
        self._up, self._place, self._mask = up, place, mask

    def __call__(self, number: int, is_up: bool, data: bytes) -> bytes:
        if not self.is_due or is_up != self._up or len(data) < 1000:
            return data
        self.is_due, at = False, self._place(data)
        return data[:at] + bytes([data[at] ^ self._mask]) + data[at + 1 :]


def middle(data: bytes) -> int:
    return len(data) // 2


def length(data: bytes) -> int:
    """The first byte of the length of a frame: with another one it is absurd."""
    return data.index(LONG_FRAME) + 1


VALUES = np.ones(1000, np.float32)
PUSH = m.Push(0, 1, 1, 0, 0, 0, 0, 1, 0, m.Packed("none", 1000, (VALUES,)))
PARAMETERS = m.Parameters(0, 1, 1, 0, VALUES)


def serve(
    house: House,
    transport: Transport,
    seen: Callable[[list[Reconnected]], object],
    reconnects: list[Reconnected] | None = None,
) -> list[Reconnected]:
    """Both go on as the loops of daemons do until something is so. Returns what the guest was told
    of its connections, also before (`reconnects`).
    """
    reconnects = reconnects or []

    def both() -> bool:
        transport.check()
        for source, _ in transport.poller.poll(0):
            reconnects.extend(e for e in transport.receive(source) if isinstance(e, Reconnected))
        return bool(seen(reconnects))

    house.until(both, COME_S)
    return reconnects


@pytest.mark.parametrize(("place", "mask"), [(middle, 1), (length, 0x40)])
def test_a_bit_that_flips_on_its_way_ends_the_connection_and_is_never_a_value(
    house: House, place: Callable[[bytes], int], mask: int
) -> None:
    """CURVE authenticates every byte; what was lost is sent again by the roles, over a new one."""
    flip = Flip(True, place, mask)
    with between(house, flip) as proxy, guest(house, address=proxy.address) as transport:
        transport.send(HERE, HEARD)
        assert house.hears(COME_S) == [(HEARD, GUEST)]
        flip.is_due = True
        transport.send(HERE, PUSH)
        assert house.hears(1.0) == [], "it was changed, and it is not heard"
        heard: list[tuple[m.Message, str]] = []

        def is_heard(_: object) -> bool:
            transport.send(HERE, PUSH)
            heard.extend(house.hears(0.3))
            return bool(heard)

        serve(house, transport, is_heard)
        message, identity = heard[0]
        assert isinstance(message, m.Push)
        assert identity == GUEST
        assert message.delta.arrays[0].tolist() == VALUES.tolist()


@pytest.mark.parametrize(("place", "mask"), [(middle, 1), (length, 0x40)])
def test_a_bit_that_flips_on_the_way_to_who_has_connected_does_not_cut_it_off_for_good(
    house: House, place: Callable[[bytes], int], mask: int
) -> None:
    """libzmq ends such a connection without a word, and never begins it again by itself."""
    flip = Flip(False, place, mask)
    with between(house, flip) as proxy, guest(house, address=proxy.address) as transport:
        transport.send(HERE, HEARD)
        peer = house.comes(COME_S)
        flip.is_due = True
        house.transport.send(peer, PARAMETERS)
        assert not house.is_heard_by(transport, 1.0), "it was changed, and it is not heard"

        def is_heard(_: object) -> bool:
            transport.send(HERE, HEARD)
            return (HEARD, GUEST) in house.hears(0.3)

        begun = time.monotonic()
        reconnects = serve(house, transport, is_heard)
        reconnects = serve(house, transport, bool, reconnects)
        assert begun <= reconnects[0].lost_at, "what was sent to the old socket is lost with it"


def is_open(transport: Transport) -> bool:
    return any(link.is_open for link in transport.handshakes._links.values())


def test_who_is_lost_and_reached_again_is_named_with_the_time_of_the_end(house: House) -> None:
    """What was sent until then may not have come; what was sent later waits in the socket."""
    ends = []

    def end(number: int, is_up: bool, data: bytes) -> bytes | None:
        return None if number in ends else data

    with between(house, end) as proxy, guest(house, address=proxy.address) as transport:
        transport.send(HERE, HEARD)
        assert house.hears(COME_S) == [(HEARD, GUEST)]
        assert not serve(house, transport, lambda _: is_open(transport)), "it is the first one"
        ends.append(proxy.connections)
        begun = time.monotonic()
        transport.send(HERE, HEARD)
        reconnects = serve(house, transport, bool)
        [(peer, lost_at)] = [(event.peer, event.lost_at) for event in reconnects]
        assert peer == HERE
        assert begun <= lost_at <= time.monotonic()
        transport.send(HERE, HEARD)
        assert house.hears(COME_S) == [(HEARD, GUEST)]


def test_who_is_connected_to_elsewhere_is_nobody_who_was_lost(house: House) -> None:
    """A machine that connects to another process of a peer has itself to say what is sent again."""

    def end(number: int, is_up: bool, data: bytes) -> bytes | None:
        return None if ended else data

    ended = False
    with between(house, end) as proxy, guest(house, address=proxy.address) as transport:
        reconnects = serve(house, transport, lambda _: is_open(transport))
        ended = True
        transport.send(HERE, HEARD)
        reconnects = serve(house, transport, lambda _: not is_open(transport), reconnects)
        transport.connect(HERE, house.address, KEYS.public(HERE))
        assert serve(house, transport, lambda _: is_open(transport), reconnects) == []


class Caller:
    """A machine that calls all the time, until it has reached again whom it had lost."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.calls_at = 0.0

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.calls_at = now + 0.02
        match event:
            case Started():
                return [Connect(HERE, self.address, KEYS.public(HERE))]
            case Reconnected(peer, lost_at):
                assert peer == HERE
                assert lost_at < now
                return [Exit(0, "reconnected")]
        return [Send(HERE, HEARD)]

    def deadline(self) -> float:
        return self.calls_at


def test_a_machine_hears_of_it_from_its_loop(house: House) -> None:
    pieces: Counter[int] = Counter()

    def end(number: int, is_up: bool, data: bytes) -> bytes | None:
        pieces[number] += is_up
        return None if number == 1 and pieces[number] > 20 else data

    with between(house, end) as proxy:
        loop = Loop(secret=KEYS.secret(GUEST))
        assert loop.run(Caller(proxy.address)) == 0
        assert proxy.connections == 2


def test_without_keys_a_connection_that_has_ended_is_begun_again_too() -> None:
    here, there, flip = Transport(zmq.Poller()), Transport(zmq.Poller()), Flip(False, length, 0x40)
    port = int(here.listen("tcp://127.0.0.1:*").rpartition(":")[2])
    proxy = Proxy(port, flip)

    def hears() -> list[Peer]:
        """From whom something has come."""
        there.send(HERE, HEARD)
        there.check()
        for source, _ in there.poller.poll(0):
            list(there.receive(source))
        return [e.peer for source, _ in here.poller.poll(100) for e in here.receive(source)]

    try:
        there.connect(HERE, proxy.address)
        first = _next(hears)
        flip.is_due = True
        here.send(first, PARAMETERS)
        assert _next(lambda: [peer for peer in hears() if peer != first])
    finally:
        proxy.close()
        there.close()
        here.close()


def _next(hears: Callable[[], list[Peer]]) -> Peer:
    """The first of those that are heard at last."""
    deadline = time.monotonic() + COME_S
    while time.monotonic() < deadline:
        for peer in hears():
            return peer
    raise AssertionError("nobody was heard")


def test_a_connection_that_succeeds_after_a_broken_handshake_is_kept(house: House) -> None:
    """libzmq has come through by itself: another socket would lose what is on its way."""
    with (
        between(house, cut_in_the_middle) as proxy,
        guest(house, address=proxy.address) as transport,
    ):
        socket = transport._dealers[HERE]
        transport.send(HERE, HEARD)
        assert house.hears(COME_S) == [(HEARD, GUEST)]
        assert proxy.connections == 2
        for source, _ in transport.poller.poll(COME_S * 1000):
            list(transport.receive(source))
        transport.check()
        assert transport._dealers[HERE] is socket


def test_that_a_connection_goes_on_is_seen_before_it_is_replaced(monkeypatch) -> None:
    """libzmq said so just after we had read of its end, and the loop had much else to do."""
    monkeypatch.setattr(reconnect, "SURE_S", 0.0)
    watched = Handshakes(zmq.Poller())
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        watched.watch(ReconnectingSocket(dealer, HERE, "", ""))
        [(monitor, link)] = watched._links.items()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            dealer.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
            listener.accept()[0].close()
            ended = False
            while not ended:
                assert monitor.poll(COME_S * 1000)
                news = recv_monitor_message(monitor)
                ended = news["event"] == zmq.Event.DISCONNECTED
                watched._take(link, int(news["event"]), int(news["value"]), [])
            assert monitor.poll(COME_S * 1000), "it goes on"
            assert watched.ended() == []
        watched.forget(dealer)
