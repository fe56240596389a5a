"""A daemon's listening socket, and guests with keys: for the tests of what strangers find there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from daemons.transport.sockets import Transport
from dlctl.control.keys import CurveKeys
from dlctl.wire import messages as m
from dlctl.wire.machine import Coming, Received

KEYS = CurveKeys(b"k" * 32)
HERE, GUEST = "server-0", "worker-0"
COME_S = 10.0
HEARD = m.Drained(GUEST)


class House:
    """A listening daemon; `names`: who may come, None: that was not said yet."""

    def __init__(
        self, names: dict[str, str] | None, address: str = "tcp://127.0.0.1:*", **options
    ) -> None:
        self.poller = zmq.Poller()
        self.transport = Transport(self.poller, KEYS.secret(HERE))
        self.address = self.transport.listen(address, **options)
        self.parts: list[Coming] = []
        """What has come of messages before all of them had."""
        if names is not None:
            self.transport.admit(names)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def hears(self, for_s: float, until: int = 1) -> list[tuple[m.Message, str]]:
        """Messages and whose keys they came with: so many, or what has come when the time is up."""
        heard: list[tuple[m.Message, str]] = []
        deadline = time.monotonic() + for_s
        while len(heard) < until and (left_s := deadline - time.monotonic()) > 0:
            for source, _ in self.poller.poll(left_s * 1000):
                for event in self.transport.receive(source):
                    if isinstance(event, Received):
                        heard.append((event.message, event.identity))
                    elif isinstance(event, Coming):
                        self.parts.append(event)
        return heard

    def comes(self, for_s: float) -> bytes:
        """The connection that the next message comes over."""
        deadline = time.monotonic() + for_s
        while time.monotonic() < deadline:
            for source, _ in self.poller.poll(100):
                for event in self.transport.receive(source):
                    assert isinstance(event.peer, bytes)
                    return event.peer
        raise AssertionError("nobody has come")

    def is_heard_by(self, transport: Transport, for_s: float) -> bool:
        """Whether something comes to a guest within that time."""
        deadline = time.monotonic() + for_s
        while time.monotonic() < deadline:
            for source, _ in transport.poller.poll(100):
                if any(isinstance(event, Received) for event in transport.receive(source)):
                    return True
        return False

    def until(self, condition: Callable[[], bool], for_s: float) -> None:
        """Go on as a daemon's loop does until something is so."""
        deadline = time.monotonic() + for_s
        while not condition():
            assert time.monotonic() < deadline, "it never was"
            self.hears(0.05)
            self.transport.check()


@contextmanager
def guest(
    house: House, name: str = GUEST, server: str = HERE, address: str = ""
) -> Iterator[Transport]:
    transport = Transport(zmq.Poller(), KEYS.secret(name))
    try:
        transport.connect(HERE, address or house.address, KEYS.public(server))
        yield transport
    finally:
        transport.close()


def finds_the_house_open(house: House, for_s: float = COME_S) -> bool:
    with guest(house) as transport:
        deadline = time.monotonic() + for_s
        while time.monotonic() < deadline:
            transport.send(HERE, HEARD)
            transport.check()
            house.transport.check()
            if (HEARD, GUEST) in house.hears(1.0):
                return True
    return False
