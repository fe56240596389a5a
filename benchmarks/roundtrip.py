"""Push, Adagrad and fetch for models of 1e4 to 25e6 parameters, against a raw TCP echo.

The baseline sends the same bytes through a socket to a process that sends them back. Nothing is
asked of these figures: they show where the time goes when models grow.
"""

from __future__ import annotations

import socket

import numpy as np

from benchmarks.echo import echo, read_exactly
from benchmarks.figures import Figure, ratio, take_turns
from benchmarks.sandbox import sandbox
from benchmarks.shard import Worker, shard
from dlctl.compress.none import Dense, DenseOptions

REPEATS = {10_000: 200, 1_000_000: 20, 25_000_000: 1}
"""Parameters -> how often a round goes there and back."""


def measure(*, quick: bool) -> list[Figure]:
    sizes = [*REPEATS][:1] if quick else [*REPEATS]
    return [_measure(size, 2 if quick else 7, REPEATS[size]) for size in sizes]


def _measure(size: int, rounds: int, repeats: int) -> Figure:
    nbytes = 4 * size
    gradient = np.ones(size, np.float32)
    with (
        sandbox() as directory,
        shard(directory, "tcp", size, "adagrad") as worker,
        echo("tcp", str(nbytes)) as there,
        socket.create_connection(("127.0.0.1", int(there.address))) as stream,
    ):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = memoryview(bytearray(nbytes))

        def bounce() -> None:
            stream.sendall(gradient.data)
            read_exactly(stream, back)

        ours_s, bare_s = take_turns(
            rounds, lambda: _push_and_fetch(worker, gradient), bounce, repeats
        )
    return ratio("roundtrip", f"{size:,} parameters / raw TCP", ours_s, bare_s)


def _push_and_fetch(worker: Worker, gradient: np.ndarray) -> None:
    """The compressor takes what it sends out of the gradient: from the second time on zeros."""
    worker.push(Dense(DenseOptions()).take(gradient))
    worker.fetch()
