"""Push, SGD and fetch against the alternatives, with one worker and with four.

All methods are running at once and alternate, except torch RPC and Ray: their processes poll when
it is not their turn and would take the cores from the others, so each is measured alone. A push and
the following fetch are in flight together, as in one call of the others, and a round trip ends with
an up-to-date model. The final state of dlctl's server is checked (replay.py). Also: the server's
cost of a push with 64 clients.
"""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median

import numpy as np
import psutil

from benchmarks.figures import Figure
from benchmarks.peers.bouncing import METHODS, OURS, ZMQ, Method, crew
from benchmarks.replay import Replay
from benchmarks.sandbox import sandbox
from benchmarks.shard import Worker, serving
from dlctl.compress.none import Dense, DenseOptions

CHAPTER = "roundtrip"
SMALL, LARGE = 10_000, 25_000_000
REPEATS = {(SMALL, 1): 500, (SMALL, 4): 300, (LARGE, 1): 3}
"""(parameters, workers) -> round trips of each worker per round."""
P50_ASKED, RATE_ASKED = 2.0, 1 / 0.45
CLIENTS, PUSHES, CLIENTS_ASKED = 64, 3200, 1.2
Rounds = dict[str, list[tuple[float, float]]]
"""Method -> (seconds of a round trip, round trips per second) of each round."""


def measure(*, quick: bool) -> list[Figure]:
    cases = [*REPEATS][:1] if quick else [*REPEATS]
    rounds = 1 if quick else 5
    figures = [
        figure
        for size, workers in cases
        for figure in _against_peers(size, workers, rounds, 20 if quick else REPEATS[size, workers])
    ]
    return [*figures, _many_clients(rounds, 128 if quick else PUSHES)]


def _against_peers(size: int, workers: int, rounds: int, repeats: int) -> list[Figure]:
    found: Rounds = {}
    here = [method for method in METHODS if not method.why_not()]
    by_themselves = [[method] for method in here if method.is_restless]
    for crowd in ([method for method in here if not method.is_restless], *by_themselves):
        found |= _in_turn(crowd, size, workers, rounds, repeats)
    figures = [_of_method(method, size, workers, found) for method in METHODS]
    return [*figures, _ours_to_zmq(size, workers, found)]


def _in_turn(methods: list[Method], size: int, workers: int, rounds: int, repeats: int) -> Rounds:
    found: Rounds = {}
    with ExitStack() as stack:
        crews = {
            method.name: stack.enter_context(crew(method, workers, size, repeats))
            for method in methods
        }
        for _ in range(rounds + 1):
            for name, its in crews.items():
                found.setdefault(name, []).append(its.work())
    return {name: its[1:] for name, its in found.items()}


def _of_method(method: Method, size: int, workers: int, found: Rounds) -> Figure:
    what = f"{method.name}, {size:,} parameters, {workers} worker{'s' * (workers > 1)}"
    if why := method.why_not():
        return Figure(CHAPTER, what, "us", (), skipped=why)
    if workers > 1:
        return Figure(CHAPTER, what, "per s", tuple(rate for _, rate in found[method.name]))
    unit, factor = ("us", 1e6) if size == SMALL else ("ms", 1e3)
    return Figure(CHAPTER, what, unit, tuple(s * factor for s, _ in found[method.name]))


def _ours_to_zmq(size: int, workers: int, found: Rounds) -> Figure:
    """Seconds of a round trip; with several workers, seconds divided by all their round trips."""
    pairs = zip(found[OURS.name], found[ZMQ.name], strict=True)
    if workers > 1:
        values = tuple(theirs / ours for (_, ours), (_, theirs) in pairs)
        what = f"{size:,} parameters, {workers} workers, rate of bare pyzmq / dlctl's"
        return Figure(CHAPTER, what, "x", values, RATE_ASKED)
    values = tuple(ours / theirs for (ours, _), (theirs, _) in pairs)
    asked = P50_ASKED if size == SMALL else None
    return Figure(CHAPTER, f"{size:,} parameters, 1 worker / bare pyzmq", "x", values, asked)


def _many_clients(rounds: int, pushes: int) -> Figure:
    """CPU time of the server for a push, with 64 clients against one."""
    gradient = np.random.default_rng(0).standard_normal(SMALL).astype(np.float32)
    delta = Dense(DenseOptions()).take(gradient.copy())
    replay = Replay(f"{CHAPTER}: {CLIENTS} clients", "sgd", SMALL)
    with sandbox() as directory, serving(directory, "ipc", SMALL, workers=CLIENTS) as invitations:
        server = psutil.Process(invitations[0].server_pid)
        workers = [Worker(invitation) for invitation in invitations]

        def cost_s(clients: int) -> float:
            before = sum(server.cpu_times()[:2])
            # One at a time: the server wakes up once for each, however many clients there are.
            for _ in range(pushes // clients):
                for worker in workers[:clients]:
                    worker.push(delta)
            return (sum(server.cpu_times()[:2]) - before) / pushes

        cost_s(CLIENTS)
        costs_s = [(cost_s(CLIENTS), cost_s(1)) for _ in range(rounds)]
        replay.push(gradient, sum(worker.pushes for worker in workers))
        replay.compare(workers[0].fetch(), workers[0].version)
        for worker in workers:
            worker.close()
    many_s, one_s = zip(*costs_s, strict=True)
    values = tuple(many / max(one, 1e-9) for many, one in costs_s)
    what = f"CPU time of the server for a push, {CLIENTS} clients / 1"
    detail = f"{median(many_s) * 1e6:.0f} us against {median(one_s) * 1e6:.0f} us"
    return Figure(CHAPTER, what, "x", values, CLIENTS_ASKED, detail)
