"""Somebody who does not belong to a run, and comes to its ports: `python -m tests.faults.strangers
WAY SECONDS RUN_DIRECTORY PORT...`. A process of its own, that the faults start and end.

It does not hurry: what it takes of the processor would be taken from the job, too.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import zmq

from dlctl.control import keys
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.token import sign
from dlctl.runs import terms
from dlctl.runs.database import RunDb
from dlctl.wire import codec
from dlctl.wire import messages as m

from .job import WORKERS, pause

PAUSE_S = 0.02
IDLE = 1000
FRAMES = 10_000
SLOT = WORKERS - 1
"""Whose key is in wrong hands; what that worker does itself does not count."""
GREETING = b"\xff" + 8 * b"\x00" + b"\x7f\x03\x00CURVE".ljust(55, b"\x00")
NOISE = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    bytes.fromhex("16030100c8010000c40303") + bytes(197),
    GREETING,
    GREETING + b"\x06\x7f" + 7 * b"\xff",
    bytes(range(256)) * 16,
    b"",
)
Round = Callable[[list[int]], None]


def noise(ports: list[int]) -> None:
    """A browser, a TLS client, half handshakes, rubbish."""
    for port in ports:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as stranger:
            stranger.sendall(random.choice(NOISE))


class Idle:
    """Connections that say nothing, as many as there can be."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []

    def __call__(self, ports: list[int]) -> None:
        for _ in range(20):
            with suppress(OSError):
                self._open.append(
                    socket.create_connection(("127.0.0.1", random.choice(ports)), 1.0)
                )
        while len(self._open) > IDLE:
            self._open.pop(0).close()


class Knocking:
    """CURVE with a key that nobody knows; without any key; and with the wrong key of the server."""

    def __init__(self, directory: Path) -> None:
        self.ring = keys.CurveKeys(keys.read(directory))
        self.context = zmq.Context()
        self._knocking: list[zmq.Socket[bytes]] = []

    def __call__(self, ports: list[int]) -> None:
        dealer = self.context.socket(zmq.DEALER)
        dealer.linger = 0
        way = random.randrange(3)
        if way:
            name = COORDINATOR if way == 1 else "server-77"
            dealer.curve_serverkey = self.ring.public(name).encode()
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.connect(f"tcp://127.0.0.1:{random.choice(ports)}")
        with suppress(zmq.Again):  # It was refused for good before it could say it.
            dealer.send_multipart(codec.encode(m.Request(1, "stop", {})), zmq.NOBLOCK)
        self._knocking.append(dealer)
        if len(self._knocking) > 8:
            self._knocking.pop(0).close()


class Guest:
    """Who has the command line's key, and sends rubbish, or asks for what there is not."""

    def __init__(self, directory: Path) -> None:
        ring = keys.CurveKeys(keys.read(directory))
        self.context = zmq.Context()
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.linger = 0
        self.dealer.curve_serverkey = ring.public(COORDINATOR).encode()
        pair = ring.pair("client")
        self.dealer.curve_publickey, self.dealer.curve_secretkey = (k.encode() for k in pair)
        self._connected = False

    def __call__(self, ports: list[int]) -> None:
        if not self._connected:
            self.dealer.connect(f"tcp://127.0.0.1:{ports[0]}")
            self._connected = True
        bad: list[list[bytes]] = [
            [b"\xdd\xff\xff\xff\xff"], [b"\x91" * 60_000], [b""], [os.urandom(200)],
            [b""] * FRAMES, [b"\x94\x04\x00\x90\x90", bytes(1 << 20)],
        ]  # fmt: skip
        with suppress(zmq.Again):
            self.dealer.send_multipart(random.choice(bad), zmq.NOBLOCK)
            unknown = m.Request(random.getrandbits(50), "format the disk", {"now": True})
            self.dealer.send_multipart(codec.encode(unknown), zmq.NOBLOCK)


class Worker:
    """A worker's key in wrong hands: on a connection of its own, with the term that there is."""

    def __init__(self, directory: Path) -> None:
        run_key = keys.read(directory)
        ring, name = keys.CurveKeys(run_key), f"worker-{SLOT}"
        with closing(RunDb(directory, readonly=True)) as db:
            issued = terms.newest(directory, db)
        self.term, self.shard_terms = issued[name], [issued["server-0"], issued["server-1"]]
        token = sign(keys.token_key(run_key), directory.name, SLOT, self.term)
        self.join = codec.encode(m.Join(directory.name, SLOT, self.term, token))
        self.context = zmq.Context()
        self.dealers: list[zmq.Socket[bytes]] = []
        for shard in range(2):
            dealer = self.context.socket(zmq.DEALER)
            dealer.linger, dealer.rcvhwm = 0, 1
            dealer.curve_serverkey = ring.public(f"server-{shard}").encode()
            pair = ring.pair(name)
            dealer.curve_publickey, dealer.curve_secretkey = (k.encode() for k in pair)
            self.dealers.append(dealer)

    def __call__(self, ports: list[int]) -> None:
        for shard, dealer in enumerate(self.dealers):
            if not dealer.getsockopt(zmq.LAST_ENDPOINT):
                dealer.connect(f"tcp://127.0.0.1:{ports[1 + shard]}")
            with suppress(zmq.Again):
                dealer.send_multipart(self.join, zmq.NOBLOCK)
                for frames in self.says(shard):
                    dealer.send_multipart(frames, zmq.NOBLOCK)

    def says(self, shard: int) -> list[list[bytes]]:
        raise NotImplementedError


class Repeating(Worker):
    """The same push without an end: ten thousand a second."""

    def says(self, shard: int) -> list[list[bytes]]:
        packed = m.Packed("none", 2, (np.ones(2, np.float32),))
        push = m.Push(SLOT, self.term, self.shard_terms[shard], 0, 0, 0, 0, 1, 0, packed)
        return [codec.encode(push)] * 100


class Deaf(Worker):
    """It asks for the shard again and again, and reads none of the answers."""

    def says(self, shard: int) -> list[list[bytes]]:
        return [codec.encode(m.Fetch(SLOT, self.term, n, 0)) for n in range(20)]


def main() -> None:
    way, seconds, directory, *rest = sys.argv[1:]
    ports = [int(port) for port in rest]
    rounds: dict[str, Callable[[], Round]] = {
        "noise": lambda: noise,
        "idle": Idle,
        "knocking": lambda: Knocking(Path(directory)),
        "guest": lambda: Guest(Path(directory)),
        "repeating": lambda: Repeating(Path(directory)),
        "deaf": lambda: Deaf(Path(directory)),
    }
    do, until = rounds[way](), time.monotonic() + float(seconds)
    while time.monotonic() < until:
        do(ports)
        pause(PAUSE_S)
    os._exit(0)  # Whatever is still open is left as it is, as strangers do.


if __name__ == "__main__":
    main()
