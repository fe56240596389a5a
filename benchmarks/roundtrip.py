"""Push, Adagrad and fetch for models of 1e4 to 25e6 parameters, against a raw TCP echo.

The baseline sends the bytes of all parameters through a socket to a process that sends them back.
It is the same for unix sockets, where large messages are in shared memory. With top-k 1 % a push
has the selected entries, and the following fetch those that changed; the measurement starts with a
packed push and ends with an up-to-date model. The server's final state is checked (replay.py).
Dense pushes are in roundtrip_dense.py, the alternatives in roundtrip_peers.py.
"""

from __future__ import annotations

from itertools import cycle

import numpy as np
import numpy.typing as npt

from benchmarks import roundtrip_dense, roundtrip_peers
from benchmarks.figures import Figure, ratio, take_turns
from benchmarks.replay import Replay, Vector
from benchmarks.roundtrip_dense import bouncing
from benchmarks.sandbox import sandbox
from benchmarks.shard import shard
from dlctl.compress.plain import take_chosen
from dlctl.wire.messages import Packed

CHAPTER = "roundtrip"
LARGE = 25_000_000
DENSITY = 0.01
PUSHES = 6
"""Number of different sparse pushes."""
TIME_ASKED, BYTES_ASKED = 0.1, 1 / 25


def measure(*, quick: bool) -> list[Figure]:
    sparse = _sparse(10_000, 2, 1) if quick else _sparse(LARGE, 7, 8)
    dense, peers = roundtrip_dense.measure(quick=quick), roundtrip_peers.measure(quick=quick)
    return [*dense, *sparse, *peers]


def _sparse(size: int, rounds: int, repeats: int) -> list[Figure]:
    """Seconds and bytes, both against a round trip of all parameters."""
    what = f"{size:,} parameters, top-k {DENSITY:.0%}"
    model, dense_bytes = np.zeros(size, np.float32), 2 * 4 * size
    replay = Replay(f"{CHAPTER}: {what}", "adagrad", size)
    pushes = [_packed(size, seed, replay.where) for seed in range(PUSHES)]
    turns = cycle(pushes)
    shares: list[float] = []
    with (
        sandbox() as directory,
        shard(directory, "tcp", size, "adagrad", "topk") as worker,
        bouncing(model) as bounce,
    ):

        def push_and_update() -> None:
            push, _ = next(turns)
            came = worker.push_and_update(push, model)
            shares.append((push.nbytes + came) / dense_bytes)

        push_and_update()
        shares.clear()  # The first fetch is a full one.
        ours_s, bare_s = take_turns(rounds, push_and_update, bounce, repeats)
        for _, (_, there) in zip(range(worker.pushes), cycle(pushes), strict=False):
            replay.push_there(there)
        replay.compare(model, worker.version)
        if not np.array_equal(model, worker.fetch()):
            raise RuntimeError(f"{CHAPTER}: the model differs from the shard")
    asked = TIME_ASKED if size == LARGE else None
    return [
        ratio(CHAPTER, f"{what} / raw TCP of all", ours_s, bare_s, asked),
        Figure(CHAPTER, f"{what}, bytes / all of them", "x", tuple(shares), BYTES_ASKED),
    ]


def _packed(size: int, seed: int, where: npt.NDArray[np.int64]) -> tuple[Packed, Vector]:
    """A push of random entries at random positions; and its values at `where`, mostly zeros."""
    random = np.random.default_rng(seed)
    chosen = np.sort(random.choice(size, int(DENSITY * size), replace=False))
    u = np.zeros(size, np.float32)
    u[chosen] = random.standard_normal(chosen.size)
    there = u[where]
    return take_chosen("topk", u, chosen, "float32"), there
