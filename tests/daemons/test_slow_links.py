"""Large messages over a link that needs seconds for them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from guarded_port import GUEST, HEARD, HERE, KEYS, House, guest

from daemons.transport.sockets import Transport
from dlctl.wire import messages as m

BYTES_PER_S = 250e3
PIECE_BYTES = 8 << 10
MODEL_BYTES = 2 << 20
ARRIVE_S = 30.0


class SlowLink:
    """A proxy before the house that carries so much in each direction, and keeps little."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ended = threading.Event()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self._sockets = [self._listener]
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            there = socket.socket()
            there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES)
            there.connect(("127.0.0.1", self._port))
            self._sockets += [here, there]
            for source, target in ((here, there), (there, here)):
                threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(PIECE_BYTES):
                self._ended.wait(len(data) / BYTES_PER_S)
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            end.close()

    def close(self) -> None:
        self._ended.set()
        for end in self._sockets:
            end.close()


@pytest.fixture
def link() -> Iterator[tuple[House, SlowLink]]:
    house = House({KEYS.public(GUEST): GUEST})
    slow = SlowLink(house.port)
    yield house, slow
    slow.close()
    house.transport.close()


@pytest.mark.long
def test_a_large_message_arrives_over_a_slow_link(link: tuple[House, SlowLink]) -> None:
    """Both ways at once, in twice the time after which libzmq gives up who says nothing."""
    house, slow = link
    values = np.random.default_rng(1).standard_normal(MODEL_BYTES // 4).astype(np.float32)
    with guest(house, address=slow.address) as transport:
        transport.send(HERE, HEARD)
        peer = house.comes(ARRIVE_S)
        transport.send(HERE, m.Initialise(0, 1, values, np.zeros(0)))
        house.transport.send(peer, m.Parameters(0, 1, 1, 0, values))
        came: list[m.Message] = []
        listener = threading.Thread(target=lambda: came.append(_next(transport)), daemon=True)
        listener.start()
        assert [type(message) for message, _ in house.hears(ARRIVE_S)] == [m.Initialise]
        listener.join(ARRIVE_S)
        assert [type(message) for message in came] == [m.Parameters]
    assert slow.connections == 1, "it never broke"


def _next(transport: Transport) -> m.Message:
    """What comes next to a guest."""
    while True:
        for source, _ in transport.poller.poll(100):
            for came in transport.receive(source):
                return came.message
