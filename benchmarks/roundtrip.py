"""Push, Adagrad and fetch for models of 1e4 to 25e6 parameters, against a raw TCP echo.

The baseline sends the bytes of all parameters through a socket to a process that sends them back.
Over unix sockets, where large messages lie in shared memory, the baseline is the same. With top-k
1 % a push brings the entries that it is of, and the fetch behind it those that have changed; what
is measured begins with a push that is packed and ends with a model that is up to date. What a user
would pick instead is measured in roundtrip_peers.py.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle

import numpy as np

from benchmarks import roundtrip_peers
from benchmarks.echo import echo, read_exactly
from benchmarks.figures import Figure, ratio, take_turns
from benchmarks.sandbox import sandbox
from benchmarks.shard import shard
from dlctl.compress.none import Dense, DenseOptions
from dlctl.compress.plain import take_chosen
from dlctl.messages import Array, Packed

CHAPTER = "roundtrip"
REPEATS = {10_000: 200, 1_000_000: 20, 25_000_000: 1}
"""Parameters -> how often a round goes there and back."""
DENSITY = 0.01
PUSHES = 6
"""Different sparse pushes, one after the other."""
TIME_ASKED, BYTES_ASKED = 0.15, 1 / 25
DENSE_ASKED = {(25_000_000, "tcp"): 1.3, (25_000_000, "ipc"): 0.4}
"""(parameters, transport) -> the ratio that was asked; smaller models show where the time goes."""


def measure(*, quick: bool) -> list[Figure]:
    sizes = [*REPEATS][:1] if quick else [*REPEATS]
    rounds = 2 if quick else 7
    dense = [_dense(size, net, rounds, REPEATS[size]) for net in ("tcp", "ipc") for size in sizes]
    sparse = _sparse(sizes[-1], rounds, 1 if quick else 8)
    return [*dense, *sparse, *roundtrip_peers.measure(quick=quick)]


def _dense(size: int, transport: str, rounds: int, repeats: int) -> Figure:
    gradient = np.ones(size, np.float32)
    with sandbox() as directory, shard(directory, transport, size, "adagrad") as worker:

        def push_and_fetch() -> None:
            """The compressor takes what it sends out of the gradient: from then on zeros."""
            worker.push(Dense(DenseOptions()).take(gradient))
            worker.fetch()

        with _bounce(gradient) as bounce:
            ours_s, bare_s = take_turns(rounds, push_and_fetch, bounce, repeats)
    what = f"{size:,} parameters, {transport} / raw TCP"
    return ratio(CHAPTER, what, ours_s, bare_s, DENSE_ASKED.get((size, transport)))


def _sparse(size: int, rounds: int, repeats: int) -> list[Figure]:
    """Seconds and bytes, both against those of all parameters there and back."""
    model, dense_bytes = np.zeros(size, np.float32), 2 * 4 * size
    pushes = cycle([_packed(size, seed) for seed in range(PUSHES)])
    shares: list[float] = []
    with (
        sandbox() as directory,
        shard(directory, "tcp", size, "adagrad", "topk") as worker,
        _bounce(model) as bounce,
    ):

        def push_and_update() -> None:
            push = next(pushes)
            came = worker.push_and_update(push, model)
            shares.append((push.nbytes + came) / dense_bytes)

        push_and_update()
        shares.clear()  # The first time everything came.
        ours_s, bare_s = take_turns(rounds, push_and_update, bounce, repeats)
        if not np.array_equal(model, worker.fetch()):
            raise RuntimeError("the model is not what the shard has")
    what = f"{size:,} parameters, top-k {DENSITY:.0%}"
    asked = TIME_ASKED if size == max(REPEATS) else None
    return [
        ratio(CHAPTER, f"{what} / raw TCP of all", ours_s, bare_s, asked),
        Figure(CHAPTER, f"{what}, bytes / all of them", "x", tuple(shares), BYTES_ASKED),
    ]


def _packed(size: int, seed: int) -> Packed:
    """A push of random entries, at random places."""
    random = np.random.default_rng(seed)
    where = np.sort(random.choice(size, int(DENSITY * size), replace=False))
    u = np.zeros(size, np.float32)
    u[where] = random.standard_normal(where.size)
    return take_chosen("topk", u, where, "float32")


@contextmanager
def _bounce(vector: Array) -> Iterator[Callable[[], None]]:
    """What sends the bytes of `vector` through a raw socket, and gets as many back."""
    with (
        echo("tcp", str(vector.nbytes)) as there,
        socket.create_connection(("127.0.0.1", int(there.address))) as stream,
    ):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = memoryview(bytearray(vector.nbytes))

        def bounce() -> None:
            stream.sendall(vector.data)
            read_exactly(stream, back)

        yield bounce
