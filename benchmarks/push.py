"""A push of 10,000 parameters until its ack, against a bare pyzmq request and reply.

Both use the same kind of socket between two processes and the same bytes: the baseline sends the
prepared frames of such a push, and receives as many bytes as an ack has. dlctl also polls all its
sockets, builds and checks both messages, applies the push exactly once, and counts it. The server's
final state is checked (replay.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import zmq

from benchmarks.echo import Echo, echo
from benchmarks.figures import Figure, ratio, take_turns
from benchmarks.placement import pinned, placements
from benchmarks.replay import Replay, Vector
from benchmarks.sandbox import sandbox
from benchmarks.shard import shard
from dlctl import registry
from dlctl.wire import codec
from dlctl.wire.messages import Packed

PARAMETERS = 10_000
ASKED = 3.0
COMPRESSORS = {"none": "dense float32", "topk": "top-k 1 %"}


def measure(*, quick: bool) -> list[Figure]:
    rounds, repeats = (1, 20) if quick else (15, 300)
    return [
        figure
        for transport in ("ipc", "tcp")
        for compressor in COMPRESSORS
        for figure in _measure(transport, compressor, rounds, repeats)
    ]


def _measure(transport: str, compressor: str, rounds: int, repeats: int) -> list[Figure]:
    """A figure for each placement of the two processes. Only dense pushes have a target."""
    delta, pushed = _delta(compressor)
    figures = []
    replay = Replay(f"push: {COMPRESSORS[compressor]}, {transport}", "sgd", PARAMETERS)
    with sandbox() as directory, shard(directory, transport, PARAMETERS, "sgd", compressor) as w:
        frames = codec.encode(w.next_push(delta))
        ack_bytes = sum(map(len, codec.encode(w.push(delta))))
        with _bare(directory, transport, frames, ack_bytes) as (there, request):
            for placement, cores in placements().items():
                with pinned((w.server_pid, there.pid), cores):
                    ours_s, bare_s = take_turns(rounds, lambda: w.push(delta), request, repeats)
                what = f"{COMPRESSORS[compressor]}, {transport}, {placement} / bare pyzmq"
                asked = ASKED if compressor == "none" else None
                figures.append(ratio("push", what, ours_s, bare_s, asked))
        replay.push(pushed, times=w.pushes)
        replay.compare(w.fetch(), w.version)
    return figures


@contextmanager
def _bare(
    directory: Path, transport: str, frames: codec.Frames, reply_bytes: int
) -> Iterator[tuple[Echo, Callable[[], object]]]:
    """The baseline: the echo process, and one request to it."""
    address = f"ipc://{directory}/echo" if transport == "ipc" else "tcp://127.0.0.1:*"
    with echo("zmq", address, str(reply_bytes)) as there, zmq.Context() as context:
        socket = context.socket(zmq.DEALER)
        socket.connect(there.address)

        def request() -> None:
            socket.send_multipart(frames)
            socket.recv_multipart()

        try:
            yield there, request
        finally:
            socket.close(linger=0)


def _delta(compressor: str) -> tuple[Packed, Vector]:
    """A push, and its values: float32[PARAMETERS], zero where nothing is sent."""
    kind = registry.load("compressors", compressor)
    gradient = np.random.default_rng(0).standard_normal(PARAMETERS).astype(np.float32)
    whole = gradient.copy()
    packed: Packed = kind(kind.Options()).take(gradient)
    return packed, whole - gradient  # The residual is what was not sent.
