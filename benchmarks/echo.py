"""The bare baseline: a process that receives bytes and sends a given number back.

    python -m benchmarks.echo zmq ADDRESS REPLY_BYTES    a ROUTER; a message in, a reply out
    python -m benchmarks.echo tcp BYTES                  a socket; BYTES in, the same out

It prints its address. The tcp server exits after one connection; the zmq one serves until it is
terminated.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import zmq


class Echo(NamedTuple):
    address: str
    pid: int


@contextmanager
def echo(*arguments: str) -> Iterator[Echo]:
    """Run an echo server in its own process until the end of the block."""
    command = [sys.executable, "-m", "benchmarks.echo", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Echo(process.stdout.readline().strip(), process.pid)
        finally:
            process.terminate()


def read_exactly(stream: socket.socket, target: memoryview) -> bool:
    """Fill `target`; False if the peer has closed."""
    filled = 0
    while filled < len(target):
        count = stream.recv_into(target[filled:])
        if not count:
            return False
        filled += count
    return True


def _serve_zmq(address: str, reply_bytes: int) -> None:
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(address)
    print(router.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
    reply = bytes(reply_bytes)
    while True:
        peer, *_ = router.recv_multipart()
        router.send_multipart([peer, reply])


def _serve_tcp(nbytes: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        stream, _ = listener.accept()
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(nbytes))
    while read_exactly(stream, buffer):
        stream.sendall(buffer)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["zmq", address, reply_bytes]:
            _serve_zmq(address, int(reply_bytes))
        case ["tcp", nbytes]:
            _serve_tcp(int(nbytes))
        case _:
            sys.exit(__doc__)
