"""A real server process kills itself in the middle of its work, and another one goes on.

This test is its coordinator and its worker, over the daemons' own sockets.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.shard import NETWORKS, SERVER, TERM, End
from daemons.transport import chunking
from dlctl.compress.topk import TopK
from dlctl.job import config
from dlctl.launch import local
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.roles.protocol.token import sign
from dlctl.runs import kept_shards, paths
from dlctl.util.threads import PART
from dlctl.wire import codec
from dlctl.wire import messages as m
from dlctl.wire.machine import Peer
from dlctl.wire.messages import APPLIED, DUPLICATE, GAP, REFUSED, Packed

pytestmark = pytest.mark.usefixtures("forked")

SLOT = 0
SIZE = 50_000
PUSHES = 8


class Run:
    """A run directory, its coordinator's socket, and one worker."""

    def __init__(
        self, directory: Path, durability: str, compressor: str, size: int = SIZE, net: str = "ipc"
    ) -> None:
        self.directory = directory / f"kept-{secrets.token_hex(2)}"
        self.servers = config.Servers(durability=durability)  # type: ignore[arg-type]
        job = config.JobFile(
            job=config.Job(name="kept", task="none"),
            optimizer=config.Choice(name="sgd", options={"lr": 1.0}),
            compression=config.Choice(name=compressor),
            servers=self.servers,
            network=NETWORKS[net],
        )
        self.size = size
        self.layout = Layout((TensorEntry("w", TRAINED, (size,), "float32"),)).to_bytes()
        self.compressor = compressor
        self.key = secrets.token_bytes(32)
        (self.directory / "logs").mkdir(parents=True)
        (self.directory / "job.json").write_text(json.dumps(config.to_dict(job)))
        self.coordinator = End()
        address = paths.socket_address(self.directory.name, "control")
        self.control = self.coordinator.transport.listen(address)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.peer: Peer = ""
        self.term = 0
        self.worker = End()

    def start(self, *, keep: bool, failpoint: str = "") -> m.Serving:
        """The next process of the server; what it answers to its assignment."""
        os.environ["DLCTL_FAILPOINT"] = failpoint
        try:
            self.term += 1
            process = local.start(self.directory, "server", SERVER, self.term, self.control)
        finally:
            del os.environ["DLCTL_FAILPOINT"]
        self.processes.append(process)
        self.peer, _ = self.coordinator.wait_for(m.Register)
        send = self.coordinator.transport.send
        send(self.peer, m.Welcome(SERVER, 0, self.term, self.key, {}))
        send(self.peer, m.Assign((0, self.size), self.layout, "", keep, step_samples=64))
        _, serving = self.coordinator.wait_for(m.Serving)
        self.worker.transport.connect(SERVER, serving.address)
        return serving

    def join(self) -> m.Joined:
        run_id = self.directory.name
        token = sign(self.key, run_id, SLOT, TERM)
        self.worker.transport.send(SERVER, m.Join(run_id, SLOT, TERM, token))
        return self.worker.wait_for(m.Joined)[1]

    def initialise(self) -> None:
        values = np.zeros(self.size, np.float32)
        self.worker.transport.send(SERVER, m.Initialise(SLOT, TERM, values, np.zeros(0)))
        self.worker.wait_for(m.Joined)

    def push(self, seq: int, value: float = -1.0) -> None:
        self.worker.transport.send(SERVER, self.message(seq, value))

    def message(self, seq: int, value: float = -1.0) -> m.Push:
        """Cell `seq` gets 1, or -value."""
        where, values = np.array([seq]), np.array([value], np.float32)
        if self.compressor == "none":
            dense = np.zeros(self.size, np.float32)
            dense[where] = values
            delta = Packed("none", self.size, (dense,))
        else:
            vector = np.zeros(self.size, np.float32)
            vector[where] = values
            delta = TopK(TopK.Options()).take(vector)
        return m.Push(SLOT, TERM, self.term, seq, 0, seq, seq, 1, 0, delta)

    def is_acknowledged(self, outcomes: tuple[str, ...]) -> bool:
        """Whether an ack comes; False: the server is dead."""
        while self.processes[-1].poll() is None:
            for socket, _ in self.worker.poller.poll(20):
                for came in self.worker.transport.receive(socket):
                    if isinstance(came.message, m.Ack):
                        assert came.message.outcome in outcomes, came
                        return True
        return False

    def fetch(self) -> m.Parameters:
        self.worker.transport.send(SERVER, m.Fetch(SLOT, TERM, 1, 0))
        return self.worker.wait_for(m.Parameters)[1]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.coordinator.transport.close()
        self.worker.transport.close()
        kept_shards.remove(self.directory, self.servers)
        paths.remove_sockets(self.directory.name)


MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    made: list[Run] = []

    def make(*options: Any) -> Run:
        made.append(Run(tmp_path, *options))
        return made[-1]

    yield make
    for run in made:
        run.close()


POINTS = [
    ("process", "none", "block updated:5"),
    ("process", "none", "commit half written:9"),
    ("process", "topk", "undo block written:4"),
    ("process", "topk", "commit written:7"),
    ("process", "topk", "block scattered:3"),
    ("disk", "topk", "commit begun:6"),
    ("disk", "none", "record written:4"),
    ("disk", "topk", "journal written:4"),
    ("disk", "none", "base written:3"),
]


@pytest.mark.per_commit(2)
@pytest.mark.parametrize(("durability", "compressor", "failpoint"), POINTS)
def test_the_next_server_has_every_acknowledged_push_and_none_twice(
    make_run: MakeRun, durability: str, compressor: str, failpoint: str
) -> None:
    run = make_run(durability, compressor)
    assert not run.start(keep=False, failpoint=failpoint).initialised
    run.join()
    run.initialise()
    done = 0
    for seq in range(PUSHES):
        run.push(seq)
        if not run.is_acknowledged((APPLIED,)):
            break
        done += 1
    assert done < PUSHES
    assert run.processes[-1].wait() == -signal.SIGKILL
    assert run.start(keep=True).initialised
    joined = run.join()
    assert joined.version in (done, done + 1)
    for seq in range(done, PUSHES):
        run.push(seq)
        assert run.is_acknowledged((APPLIED, DUPLICATE))
    parameters = run.fetch()
    assert parameters.version == PUSHES
    assert parameters.values[:PUSHES].tolist() == [1] * PUSHES
    assert not parameters.values[PUSHES:].any()
    run.coordinator.transport.send(run.peer, m.Shutdown("over"))
    assert run.processes[-1].wait(20) == 0
    assert kept_shards.kept(run.directory, run.servers) == []


def test_a_server_that_dies_while_a_large_push_comes_has_nothing_of_it(make_run: MakeRun) -> None:
    """Over TCP it is worked on as it comes; of this one the end never does."""
    run = make_run("process", "none", 3_000_000, "tcp")
    run.start(keep=False, failpoint="block updated:50")
    run.join()
    run.initialise()
    run.push(0)
    assert run.is_acknowledged((APPLIED,))
    *parts, _ = chunking.cut(codec.encode(run.message(1)), 1)
    for part in parts:
        run.worker.transport._dealers[SERVER].send_multipart(part)
    assert run.processes[-1].wait(20) == -signal.SIGKILL
    assert run.start(keep=True).initialised
    assert run.join().version == 1
    run.push(1)
    assert run.is_acknowledged((APPLIED,))
    assert run.fetch().values[:3].tolist() == [1, 1, 0]


def test_what_never_was_in_the_message_never_gets_into_the_shard(make_run: MakeRun) -> None:
    """The memory that a push comes into is full of poison; and its sender counts the header in,
    so that who is told how much has come would take what has not for values.
    """
    run = make_run("process", "none", 2 * PART + 17, "tcp")
    run.start(keep=False)
    run.join()
    run.initialise()
    poison = np.full(run.size + 16, np.nan, np.float32)
    for _ in range(3):
        delta = Packed("none", poison.size, (poison,))
        run.worker.transport.send(SERVER, replace(run.message(99), delta=delta))
        assert run.is_acknowledged((GAP,))
    head, body = codec.encode(run.message(0))
    dealer = run.worker.transport._dealers[SERVER]
    lengths, at = struct.pack("<2Q", len(head), len(body)), -(-len(head) // 64) * 64

    def segment(kind: bytes, place: int, *rest: bytes) -> None:
        dealer.send_multipart([chunking._HEAD.pack(kind, 5, place), *rest])

    segment(b"\xc1beg", 0, lengths, b"", b"")
    segment(b"\xc1seg", 0, head)
    segment(b"\xc1seg", at, bytes(body[: 4 * PART]))
    segment(b"\xc1seg", at + 4 * PART, bytes(body[4 * PART :]))
    run.push(0)
    assert run.is_acknowledged((APPLIED,))
    assert run.processes[-1].poll() is None
    assert np.isfinite(run.fetch().values).all()


@pytest.mark.per_commit(2)
@pytest.mark.parametrize(("compressor", "net"), [("none", "ipc"), ("none", "tcp"), ("topk", "ipc")])
def test_a_server_refuses_poison_counts_it_and_goes_on(
    make_run: MakeRun, compressor: str, net: str
) -> None:
    """A NaN, and a push that is absurdly large: nothing of either is applied, and both are settled,
    so that nobody sends them again.
    """
    run = make_run("process", compressor, SIZE, net)
    run.start(keep=False)
    run.join()
    run.initialise()
    run.push(0)
    assert run.is_acknowledged((APPLIED,))
    for seq, value, why in (
        (1, np.nan, "it holds values that are not finite, or its norm is not"),
        (2, 1e10, "its norm is 1e+10, above servers.push_norm_max = 1e+09"),
    ):
        run.push(seq, value)
        ack = run.worker.wait_for(m.Ack)[1]
        steps = f"steps {seq}..{seq}"
        reason = f"refused a push of worker-0 (term {TERM}, number {seq}, {steps}): {why}"
        assert (ack.seq, ack.outcome, ack.reason) == (seq, REFUSED, reason)
        run.push(seq, value)
        assert run.worker.wait_for(m.Ack)[1].outcome == REFUSED, "it says the same again"
    metrics: dict[str, Any] = {}
    while "poison" not in metrics:
        metrics = run.coordinator.wait_for(m.Report)[1].metrics
    assert metrics["poison"] == {"worker-0": 2}
    assert metrics["refused"] == 2
    assert metrics["version"] == 1
    run.push(3)
    assert run.is_acknowledged((APPLIED,))
    parameters = run.fetch()
    assert parameters.version == 2
    assert parameters.values[:4].tolist() == [1, 0, 0, 1]
    assert not parameters.values[4:].any()
    assert run.processes[-1].poll() is None


@pytest.mark.long
@pytest.mark.per_commit(1)
@pytest.mark.parametrize(("durability", "compressor"), [("process", "topk"), ("disk", "none")])
def test_a_server_whose_update_comes_to_infinity_ends_and_has_nothing_of_it(
    make_run: MakeRun, durability: str, compressor: str
) -> None:
    """With a rate that nobody can set, and a push that is sound."""
    run = make_run(durability, compressor)
    run.start(keep=False)
    run.join()
    run.initialise()
    run.push(0)
    assert run.is_acknowledged((APPLIED,))
    run.coordinator.transport.send(run.peer, m.ChangeSettings(1, {"lr": 1e35}))
    run.coordinator.wait_for(m.Changed)
    run.push(1, -1e8)
    failed = run.coordinator.wait_for(m.Failed)[1]
    assert failed.fatal
    assert '"w"' in failed.error
    assert run.processes[-1].wait(20) == 1
    messages = [
        came.message
        for socket, _ in run.worker.poller.poll(100)
        for came in run.worker.transport.receive(socket)
    ]
    assert not [message for message in messages if isinstance(message, m.Ack)]
    assert run.start(keep=True).initialised
    joined = run.join()
    assert (joined.version, joined.next_seq) == (1, 1)
    assert run.fetch().values[:3].tolist() == [1, 0, 0]


def test_a_server_whose_state_is_gone_says_so_and_ends(make_run: MakeRun) -> None:
    run = make_run("process", "none")
    process = local.start(run.directory, "server", SERVER, 1, run.control)
    run.processes.append(process)
    peer, _ = run.coordinator.wait_for(m.Register)
    run.coordinator.transport.send(peer, m.Welcome(SERVER, 0, 1, b"", {}))
    run.coordinator.transport.send(
        peer, m.Assign((0, run.size), run.layout, "", keep=True, step_samples=64)
    )
    _, failed = run.coordinator.wait_for(m.Failed)
    assert failed.fatal
    assert "shard 0" in failed.error
    assert "shard-0.state" in failed.detail
    assert process.wait(20) == 1
