"""Workers and agents that say what cannot be: they are believed as far as it can, no further."""

from __future__ import annotations

import json
import math
import random
import zlib
from dataclasses import dataclass, replace
from typing import Any

import pytest
from simulated import ACCOUNT, job_file, ledger_checkers

from daemons.transport import chunking
from dlctl.job.config import Host
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.checkers import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import LeastSquares, Ledger
from dlctl.sim.simulation import Simulation
from dlctl.sim.world import World
from dlctl.wire import codec
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Note, Received, Send


def in_the_middle() -> Simulation:
    """Of a run whose portions are of 16 samples in 2 batches."""
    problem = Ledger(shards=2, samples=128, cells=300)
    job = job_file(2, 2, optimizer=ACCOUNT, batch_size=8, portion_batches=2, epochs=2.0)
    checkers = ledger_checkers(problem, 2, once=True)
    compute = ComputeOptions(step_s=0.05, spread=0.0)
    simulation = Simulation(job, problem, compute=compute, checkers=checkers)
    assert simulation.run(0.9).state == ""
    return simulation


def tell(world: World, message: m.Message, peer: Any) -> list[Effect]:
    process = world.process(COORDINATOR)
    return process.machine.handle(Received(peer, message), process.clock())


def held(world: Any, slot: int) -> m.PortionDone:
    """What the worker of a slot may say is done."""
    taken = world.machine(COORDINATOR).data.pool.take(slot, 0.0)
    return m.PortionDone(slot, 1, taken.data_epoch, taken.portion, 2, 16, 4.0)


@pytest.mark.parametrize(
    ("absurd", "why"),
    [
        ({"steps": 2**62}, "4611686018427387904 steps and 16 samples of a portion of 2 and 16"),
        ({"steps": 3}, "3 steps and 16 samples of a portion of 2 and 16"),
        ({"samples": 17}, "2 steps and 17 samples of a portion of 2 and 16"),
    ],
)
def test_more_steps_or_samples_than_a_portion_has_are_refused(absurd, why):
    world = in_the_middle().world
    progress = world.machine(COORDINATOR).progress
    done, before = held(world, 0), (progress.steps, progress.samples, progress.loss)
    effects = tell(world, replace(done, **absurd), b"x")
    notes = [effect.text for effect in effects if isinstance(effect, Note)]
    assert [note.endswith(why) for note in notes] == [True]
    assert not [effect for effect in effects if isinstance(effect, Send)], "it is not noted"
    assert (progress.steps, progress.samples, progress.loss) == before
    tell(world, done, b"x")
    assert (progress.steps, progress.samples) == (before[0] + 2, before[1] + 16)


@pytest.mark.parametrize("loss_sum", [math.nan, math.inf, -math.inf, 1.7e308])
def test_no_loss_makes_the_mean_of_all_something_else_than_a_number(loss_sum):
    world = in_the_middle().world
    progress = world.machine(COORDINATOR).progress
    for sign in (1.0, -1.0, 1.0):
        before = progress.steps
        tell(world, replace(held(world, 0), loss_sum=sign * loss_sum, samples=1), b"x")
        assert progress.steps == before + 2
        assert math.isfinite(progress.loss)


def test_of_a_portion_s_metrics_only_numbers_count_and_no_more_than_there_may_be():
    world = in_the_middle().world
    progress = world.machine(COORDINATOR).progress
    sums = {
        "good": [32.0, 16], "half": [4.0, 8], "nan": [math.nan, 16], "inf": [math.inf, 16],
        "more": [1.0, 17], "none": [1.0, 0], "text": "1", "pair": [1.0, 2, 3], "flat": 1.0,
    }  # fmt: skip
    tell(world, replace(held(world, 0), metric_sums=sums), b"x")
    assert progress.metrics == {"good": 2.0, "half": 0.5}
    many = {"good": [48.0, 16]} | {f"{n}" * 300: [1.0, 1] for n in range(100, 200)}
    tell(world, replace(held(world, 0), metric_sums=many), b"x")
    assert progress.metrics["good"] == pytest.approx(2.1), "the newest has a tenth"
    assert len(progress.metrics) == 64
    assert max(map(len, progress.metrics)) == 200


def test_a_portion_of_somebody_else_is_not_done():
    simulation = in_the_middle()
    machine = simulation.world.machine(COORDINATOR)
    steps = machine.progress.steps
    for epoch in range(2):
        for portion in range(8):
            if not machine.data.pool.may_finish(0, epoch, portion):
                done = m.PortionDone(0, 1, epoch, portion, 2, 16, 4.0)
                tell(simulation.world, done, b"x")
    assert machine.progress.steps == steps
    assert simulation.run().state == "finished"


NOISE = random.Random(7).randbytes(60_000)


@pytest.mark.parametrize(
    ("metrics", "pages"),
    [
        ({f"metric {n}": "x" * 50 for n in range(900)}, 1),
        ({"a": {"b": {"c": {"d": {"e": 1}}}}}, 1),
        ({f"metric {n}": NOISE[n * 50 : n * 50 + 25].hex() for n in range(900)}, 1),
        ({f"metric {n}": NOISE[n * 60 : n * 60 + 59].decode("latin1") for n in range(600)}, 2),
    ],
)
def test_a_report_with_too_much_in_it_does_not_keep_anybody_from_reading_the_status(metrics, pages):
    world = in_the_middle().world
    for name in ("worker-0", "worker-1"):
        report = m.Report(name, 1, "computing", "", metrics)
        tell(world, codec.decode(codec.encode(report)), name.encode())
    world.machine(COORDINATOR).members.daemons["worker-1"].ended(
        m.ProcessExited("worker-1", 1, 1, ("a secret",)), 1.0
    )
    rows = []
    for number in range(1, pages + 1):
        effects = tell(world, m.Request(number, "status", {"first": len(rows)}), b"a reader")
        (reply,) = [e.message for e in effects if isinstance(e, Send) and e.peer == b"a reader"]
        read = codec.decode(codec.encode(reply))
        assert len(read.data) < chunking.FRAME_BYTES_MIN
        assert b"a secret" not in zlib.decompress(read.data)
        rows += json.loads(zlib.decompress(read.data))["daemons"]
    assert [row["name"] for row in rows] == list(world.store.daemons)
    assert rows[-1]["metrics"] == metrics


def test_absurd_texts_of_daemons_leave_room_for_the_state_of_the_run():
    world = in_the_middle().world
    text = NOISE.decode("latin1")
    for number, name in enumerate(("server-0", "server-1", "worker-0", "worker-1")):
        report = m.Report(name, 1, text[number * 9 :][:20_000], text[20_000:40_000], {})
        tell(world, codec.decode(codec.encode(report)), name.encode())
        world.machine(COORDINATOR).members.daemons[name].change_state("draining")
    effects = tell(world, m.Request(1, "status", {"first": 3}), b"a reader")
    (reply,) = [e.message for e in effects if isinstance(e, Send) and e.peer == b"a reader"]
    assert len(reply.data) < chunking.FRAME_BYTES_MIN
    read = json.loads(zlib.decompress(reply.data))
    assert (read["run"]["step"] > 0, "problems" in read["run"]) == (True, False)
    assert read["daemons"][0]["waiting_for"] == text[20_000:40_000]


@dataclass
class SavesSomethingElse(Checker):
    """What worker-1 says of each file that it saves is wrong."""

    wrong: dict[str, Any]
    count: int = 0

    def on_effect(self, process: Any, effect: Effect) -> None:
        message = effect.message if isinstance(effect, Send) else None
        if process.name == "worker-1" and isinstance(message, m.Saved):
            self.count += 1
            for key, value in self.wrong.items():
                object.__setattr__(message, key, value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sha256": "0" * 64}, {"nbytes": 3}, {"file": "shard-0.safetensors"}, {"sha256": ""},
        {"error": "no space left"},
    ],
)  # fmt: skip
def test_no_checkpoint_is_complete_with_a_file_that_is_not_what_its_worker_says(wrong):
    lies = SavesSomethingElse(wrong)
    job = job_file(2, 1, compression=("topk", {"density": 0.1}), checkpoint_s=1.0, epochs=8.0)
    simulation = Simulation(job, LeastSquares(), checkers=(lies,))
    outcome = simulation.run()
    store = outcome.store
    assert outcome.state == "finished"
    assert lies.count >= 2
    assert store.manifests
    for directory, manifest in store.manifests.items():
        assert store.verify(directory) == []
        assert [part["name"] for part in manifest["workers"]] == ["worker-0"]
    rows = list(store.checkpoints.values())
    assert [(row["error"], row["without"]) for row in rows] == [("", ["worker-1"])] * len(rows)


HOSTS = (Host(ssh="h1"), Host(ssh="h2"), Host(ssh="h3"))


def test_what_an_agent_says_of_a_daemon_that_is_not_its_own_any_more_is_answered_and_forgotten():
    problem = Ledger(shards=1, samples=512, cells=300)
    job = job_file(
        4, 1, optimizer=ACCOUNT, batch_size=8, portion_batches=2, epochs=2.0, hosts=HOSTS
    )
    simulation = Simulation(job, problem, compute=ComputeOptions(step_s=0.2))
    world = simulation.world
    reports: list[int] = []

    def ask() -> None:
        """It has no such child, and says so until that is noted."""
        agent = world.process("agent-2")
        assert world.process("worker-3").agent == "agent-3"
        for effect in agent.machine.handle(
            Received(COORDINATOR, m.Kill("worker-3", 1, 9)), agent.clock()
        ):
            if isinstance(effect, Send):
                world.network.send(agent, effect.peer, effect.message)

    def look() -> None:
        waiting = [key for key, _, _ in world.machine("agent-2").context.retries.waiting()]
        reports.append(len([key for key in waiting if key[0] == "exit"]))

    simulation.at(3.0, ask)
    simulation.at(6.0, look)
    outcome = simulation.run()
    assert reports == [0]
    assert outcome.state == "finished"
    assert [str(p) for p in world.processes if p.name == "worker-3"] == ["worker-3.1"]
