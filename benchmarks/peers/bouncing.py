"""Round trips of several workers at once, measured for each method in turn."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import IO

from benchmarks.peers.bounce import Order, gradient_of
from benchmarks.peers.places import ROOT, free_port
from benchmarks.peers.settings import why_not_there
from benchmarks.replay import Replay
from benchmarks.sandbox import sandbox
from benchmarks.shard import Invitation, Worker, serving


@dataclass(frozen=True)
class Method:
    name: str
    key: str
    """In `bounce.METHODS`."""
    has_server: bool = True
    is_one_program: bool = False
    workers_min: int = 1
    is_restless: bool = False
    """Its processes are busy when it is not its turn, so it is measured alone."""
    needs: str = ""

    def why_not(self) -> str:
        """What is missing here; "" if it can be measured."""
        return why_not_there(self.needs)


OURS, ZMQ = Method("dlctl", "dlctl"), Method("bare pyzmq", "pyzmq")
METHODS = [
    OURS,
    ZMQ,
    Method("torch RPC server", "rpc", is_restless=True),
    Method("gloo all-reduce", "gloo", has_server=False, workers_min=2),
    Method("Ray actor", "ray", is_one_program=True, is_restless=True, needs="ray"),
]


class Crew:
    """The processes of one method, all ready."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]], speakers: int) -> None:
        self._processes = processes
        self._speakers = processes[-speakers:]
        self.rounds = 0
        """Number of completed rounds."""

    def work(self) -> tuple[float, float]:
        """(median seconds of a round trip, round trips per second of all workers together)"""
        self.rounds += 1
        for process in self._speakers:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        times_s = [json.loads(_line(process)) for process in self._speakers]
        workers = times_s[0] if isinstance(times_s[0][0], list) else times_s
        rate = sum(len(own_s) / sum(own_s) for own_s in workers)
        return median(s for own_s in workers for s in own_s), rate


@contextmanager
def crew(method: Method, workers: int, size: int, count: int) -> Iterator[Crew]:
    """Raises RuntimeError if a process does not start, or if the final state of dlctl's server is
    not the result of all pushes."""
    workers = max(workers, method.workers_min)
    with ExitStack() as stack:
        order = Order(rank=0, workers=workers, size=size, count=count, port=free_port())
        orders = [dataclasses.replace(order, rank=rank) for rank in range(workers + 1)]
        if method is OURS:
            directory = stack.enter_context(sandbox())
            serves = serving(directory, "tcp", size, "sgd", workers=workers + 1)
            *guests, witness = stack.enter_context(serves)
            orders = [dataclasses.replace(order, invitation=[*guest]) for guest in guests]
        elif method.is_one_program:
            orders = [order]
        elif not method.has_server:
            orders = orders[:-1]
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        processes = [stack.enter_context(_process(method, order, log)) for order in orders]
        for process in processes:
            if _line(process) != "ready\n":
                log.seek(0)
                raise RuntimeError(f"{method.name} did not start: {log.read()}")
        its = Crew(processes, 1 if method.is_one_program else workers)
        yield its
        if method is OURS:
            _check(witness, its.rounds * workers * count)


def _check(witness: Invitation, pushes: int) -> None:
    """witness: a worker that pushed nothing. All pushes are equal, so their order is irrelevant."""
    worker = Worker(witness)
    replay = Replay(f"roundtrip: {witness.size:,} parameters, all workers", "sgd", witness.size)
    replay.push(gradient_of(witness.size), pushes)
    try:
        replay.compare(worker.fetch(), worker.version)
    finally:
        worker.close()


@contextmanager
def _process(method: Method, order: Order, log: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """Its stderr goes to `log`."""
    order_json = json.dumps(dataclasses.asdict(order))
    interface = {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.peers.bounce", method.key, order_json],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
        env=os.environ | interface, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        if not method.is_one_program:
            process.kill()
        process.stdin.close()  # One program has child processes to terminate.
        process.wait()
        process.stdout.close()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()
