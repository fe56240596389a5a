"""A push of 10,000 parameters until its ack, against a bare pyzmq request and reply.

Both cross the same kind of socket between two processes with the same bytes: the baseline sends
the frames of such a push, made beforehand, and gets as many bytes back as an ack has. What dlctl
does on top: make and check both messages, apply the push exactly once, count it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import zmq

from benchmarks.echo import echo
from benchmarks.figures import Figure, ratio, take_turns
from benchmarks.sandbox import sandbox
from benchmarks.shard import shard
from dlctl import registry, wire
from dlctl.messages import Packed

PARAMETERS = 10_000
COMPRESSORS = {"none": "dense float32", "topk": "top-k 1 %"}


def measure(*, quick: bool) -> list[Figure]:
    rounds, repeats = (2, 50) if quick else (15, 300)
    return [
        _measure(transport, compressor, rounds, repeats)
        for transport in ("ipc", "tcp")
        for compressor in COMPRESSORS
    ]


def _measure(transport: str, compressor: str, rounds: int, repeats: int) -> Figure:
    delta = _delta(compressor)
    with sandbox() as directory, shard(directory, transport, PARAMETERS, "sgd", compressor) as w:
        frames = wire.encode(w.next_push(delta))
        ack = wire.encode(w.push(delta))
        address = f"ipc://{directory}/echo" if transport == "ipc" else "tcp://127.0.0.1:*"
        with echo("zmq", address, str(sum(map(len, ack)))) as there, zmq.Context() as context:
            bare = context.socket(zmq.DEALER)
            bare.connect(there)

            def request() -> None:
                bare.send_multipart(frames)
                bare.recv_multipart()

            ours_s, bare_s = take_turns(rounds, lambda: w.push(delta), request, repeats)
            bare.close(linger=0)
    what = f"push, {COMPRESSORS[compressor]}, {transport} / bare pyzmq"
    return ratio("push", what, ours_s, bare_s, asked=3.0)


def _delta(compressor: str) -> Packed:
    kind = registry.load("compressors", compressor)
    gradient = np.random.default_rng(0).standard_normal(PARAMETERS).astype(np.float32)
    packed: Packed = kind(kind.Options()).take(gradient)
    return packed
