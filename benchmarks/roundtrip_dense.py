"""A round trip of all parameters: on this machine, and over links of some Gbit/s.

The measurement is from a gradient to an up-to-date model: the compressor takes the gradient, it is
pushed and applied (Adagrad), and the answer to the following fetch is copied into the model. The
server's final state is checked (replay.py).

    python -m benchmarks.roundtrip_dense SIZE ROUNDS    prints the seconds over TCP, as JSON

On an unlimited loopback the cores are the bottleneck; over a network the work overlaps with the
transfer. The baseline uses the same link.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.echo import echo, read_exactly
from benchmarks.figures import Figure, ratio, take_turns
from benchmarks.link import link
from benchmarks.replay import Gradients
from benchmarks.sandbox import sandbox
from benchmarks.shard import shard
from dlctl.compress.none import Dense, DenseOptions
from dlctl.wire.messages import Array
from tests.hosts.cluster import missing

CHAPTER = "roundtrip"
REPEATS = {10_000: 200, 1_000_000: 20, 25_000_000: 1}
"""Parameters -> round trips per round."""
ASKED = {(25_000_000, "tcp"): 1.2, (25_000_000, "ipc"): 0.45}
"""(parameters, transport) -> target ratio; smaller models show where the time goes."""
LINK_GBIT_PER_S = (1, 4, 8)
LINK_S_MAX = 300.0

Seconds = tuple[list[float], list[float]]
"""Of dlctl and of the echo, round by round."""


def measure(*, quick: bool) -> list[Figure]:
    sizes = [*REPEATS][:1] if quick else [*REPEATS]
    rounds = 2 if quick else 7
    here = [_here(size, net, rounds) for net in ("tcp", "ipc") for size in sizes]
    rates = LINK_GBIT_PER_S[-1:] if quick else LINK_GBIT_PER_S
    return [*here, *(_over_link(rate, sizes[-1], rounds) for rate in rates)]


def _here(size: int, transport: str, rounds: int) -> Figure:
    seconds = _seconds(size, transport, rounds)
    what = f"{size:,} parameters, gradient to model, {transport} / raw TCP"
    return ratio(CHAPTER, what, *seconds, ASKED.get((size, transport)))


def _over_link(gbit_per_s: int, size: int, rounds: int) -> Figure:
    what = f"{size:,} parameters, gradient to model, tcp / raw TCP, at {gbit_per_s} Gbit/s"
    if why := missing():
        return Figure(CHAPTER, what, "x", (), skipped=why)
    with link(gbit_per_s) as lab:
        command = [sys.executable, "-m", "benchmarks.roundtrip_dense", str(size), str(rounds)]
        ended = lab.run(*command, timeout_s=LINK_S_MAX)
    if ended.returncode:
        raise RuntimeError(f"the round trip over a link has failed: {ended.stderr}")
    return ratio(CHAPTER, what, *json.loads(ended.stdout))


def _seconds(size: int, transport: str, rounds: int) -> Seconds:
    gradients = Gradients(f"{CHAPTER}: {size:,} parameters, {transport}", "adagrad", size)
    model, compressor = np.zeros(size, np.float32), Dense(DenseOptions())
    with sandbox() as directory, shard(directory, transport, size, "adagrad") as worker:

        def push_and_update() -> None:
            """The compressor moves what it sends out of the gradient and leaves zeros."""
            worker.push_and_update(compressor.take(gradients.gradient), model)

        with bouncing(np.ones(size, np.float32)) as bounce:
            seconds = take_turns(rounds, push_and_update, bounce, REPEATS[size], gradients.fill)
        gradients.compare(model, worker.version)
        gradients.compare(worker.fetch(), worker.version)
    return seconds


@contextmanager
def bouncing(vector: Array) -> Iterator[Callable[[], None]]:
    """A function that sends the bytes of `vector` over a raw socket and receives as many."""
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


if __name__ == "__main__":
    size, rounds = map(int, sys.argv[1:])
    print(json.dumps(_seconds(size, "tcp", rounds)))
