"""Downpour with intervals that are "auto": they change when it pushes and fetches, and no more."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scenarios import COMPUTE, HEAL_AT_S, TIMEOUTS, mixed_faults, poor_network
from simulated import ACCOUNT, Watcher, job_file, ledger_checkers

from dlctl.algorithms.base import Needs, Site
from dlctl.algorithms.methods.downpour import DOWNPOUR, Options, Replica
from dlctl.algorithms.needs import Gradient, NextData, Read, Step, Write
from dlctl.algorithms.rounds import DISCARDED_MAX
from dlctl.registry import Component
from dlctl.sim.checkers import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import LeastSquares, Ledger, layout_of
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.wire.messages import Push

AUTO = {"push_every_steps": "auto", "fetch_every_steps": "auto", "inner_lr": 0.0}
STEP_S = 0.01
FAST, SLOW = SimLink(), SimLink(bytes_per_s=5e3)
"""A push of 100 float32 and its header take 0.09 s over the slow one: 9 steps."""


class Waiting(Checker):
    """(seconds, computed, waited, steps from push to push, from fetch to fetch) of worker-0."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float, int, int]] = []

    def on_effect(self, process: Any, effect: Any) -> None:
        training = getattr(process.machine, "training", None)
        if process.name == "worker-0" and training is not None:
            pacing, side = training.accounts.pacing, training.side
            push, fetch = (side.interval(f"{d}_every_steps") for d in ("push", "fetch"))
            row = (process.timeline.now, pacing.computed_s, pacing.waited_s, push, fetch)
            self.rows.append(row)

    def share(self, since_s: float, until_s: float = math.inf) -> float:
        """Of the time between, that was waited."""
        rows = [row for row in self.rows if since_s <= row[0] < until_s]
        computed_s, waited_s = (rows[-1][i] - rows[0][i] for i in (1, 2))
        return waited_s / (waited_s + computed_s)

    def intervals(self, at_s: float) -> tuple[int, int]:
        """(push, fetch) at a time."""
        return [row[3:] for row in self.rows if row[0] <= at_s][-1]


def simulation(
    link: SimLink,
    *checkers: Checker,
    workers: int = 1,
    method: dict[str, Any] | None = None,
    **job: Any,
) -> Simulation:
    options = AUTO | (method or {})
    job = {"seconds": 15.0} | job
    return Simulation(
        job_file(workers, algorithm=("downpour", options), optimizer=("sgd", {"lr": 1e-4}), **job),
        LeastSquares(samples=1920, size=100),
        seed=1,
        network=NetworkOptions(link=link),
        compute=ComputeOptions(step_s=STEP_S),
        checkers=checkers,
    )


# ---------------------------------------------------------------- what it is for


@pytest.mark.long
def test_over_a_slow_link_the_waiting_stays_under_the_share_and_with_1_it_does_not() -> None:
    waiting, often = Waiting(), Waiting()
    assert simulation(SLOW, waiting).run().state == "finished"
    simulation(SLOW, often, method={"push_every_steps": 1, "fetch_every_steps": 1}).run()
    assert often.share(2.0) > 0.8
    assert waiting.share(2.0) < 0.1
    assert 7 <= waiting.intervals(15.0)[0] <= 10


def test_over_a_fast_link_every_step_is_pushed_and_fetched() -> None:
    waiting = Waiting()
    simulation(FAST, waiting, seconds=3.0).run()
    assert waiting.share(0.5) == 0.0
    assert waiting.intervals(3.0) == (1, 1)


@pytest.mark.long
def test_workers_that_share_what_there_is_with_jitter_keep_it_too() -> None:
    waiting = Waiting()
    simulation(SimLink(bytes_per_s=5e3, jitter_s=0.02), waiting, workers=3).run()
    assert waiting.share(3.0) < 0.12


@pytest.mark.long
def test_a_method_that_waits_for_its_fetches_fetches_less_over_a_long_way() -> None:
    waiting, options = Waiting(), {"overlap": False, "auto_steps_max": 200}
    simulation(SimLink(latency_s=0.005), waiting, method=options).run()
    assert waiting.share(3.0) < 0.1
    assert 10 <= waiting.intervals(15.0)[1] <= 40, "0.01 s there and back, 5 % of the time"


@pytest.mark.long
def test_the_same_seed_gives_the_same_trace() -> None:
    first, again = (simulation(SimLink(bytes_per_s=5e3, jitter_s=0.02)).run() for _ in range(2))
    assert first.trace == again.trace
    assert np.array_equal(first.weights, again.weights)


# ---------------------------------------------------------------- changes while the run goes on


def set_live(when_s: float, run: Simulation, **settings: str) -> None:
    run.request(when_s, "set", {"names": ["worker-0"], "settings": settings})


@pytest.mark.long
def test_a_limit_that_changes_live_is_followed_within_a_second() -> None:
    waiting = Waiting()
    run = simulation(FAST, waiting, push="5kB/s")
    set_live(5.0, run, push="off")
    set_live(9.0, run, push="2kB/s")
    run.run()
    assert 7 <= waiting.intervals(5.0)[0] <= 9
    assert waiting.intervals(6.0)[0] == 1
    assert 17 <= waiting.intervals(10.5)[0] <= 24
    assert waiting.share(10.5) < 0.12


def test_set_makes_an_interval_automatic_and_takes_it_back_and_says_both() -> None:
    waiting = Waiting()
    run = simulation(SLOW, waiting, method={"push_every_steps": 2})
    to_auto = run.request(
        4.0, "set", {"names": ["worker-0"], "settings": {"push_every_steps": "auto"}}
    )
    to_number = run.request(
        9.0, "set", {"names": ["worker-0"], "settings": {"push_every_steps": "3"}}
    )
    outcome = run.run()
    said = [[(row["before"], row["after"]) for row in asked.reply.result["changes"]]
            for asked in (to_auto, to_number)]  # fmt: skip
    assert said == [[(2, "auto")], [("auto", 3)]]
    assert [waiting.intervals(at)[0] for at in (3.9, 15.0)] == [2, 3]
    assert 7 <= waiting.intervals(8.9)[0] <= 10
    assert waiting.share(2.0, 4.0) > 0.5 > 0.12 > waiting.share(5.5, 9.0)

    reports = [values for at, name, _, values in outcome.store.metrics if name == "worker-0"]
    seen = [(v["settings"]["push_every_steps"], v["intervals"]["push_every_steps"]) for v in reports
            if "intervals" in v]  # fmt: skip
    assert (2, 2) in seen
    assert (3, 3) in seen
    assert any(setting == "auto" and steps in range(7, 11) for setting, steps in seen)
    assert all(0 <= v["wait_share"] <= 1 for v in reports if "wait_share" in v)
    assert max(v.get("wait_share", 0) for v in reports) > 0.5


@pytest.mark.long
def test_a_replaced_worker_is_automatic_as_well() -> None:
    run = simulation(SLOW, workers=2, seconds=8.0, method={"push_every_steps": 2})
    set_live(2.0, run, push_every_steps="auto")
    run.at(3.0, lambda: run.world.kill("worker-0"))
    outcome = run.run()
    assert outcome.world.process("worker-0").incarnation == 2
    machine = outcome.world.machine("worker-0")
    assert machine.settings.values()["push_every_steps"] == "auto"
    assert machine.training.side.interval("push_every_steps") >= 7


# ---------------------------------------------------------------- what stays as it is


@pytest.mark.parametrize("seed", range(4))
def test_every_gradient_is_applied_once_whatever_happens_to_the_network(seed: int) -> None:
    problem, epochs = Ledger(shards=2, cells=200), 4
    job = job_file(
        3, 2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, seed=seed, epochs=float(epochs),
        checkpoint_s=0.6, restarts_max=20, timeouts=TIMEOUTS,
        algorithm=("downpour", {k: v for k, v in AUTO.items() if k != "inner_lr"}),
    )  # fmt: skip
    outcome = Simulation(
        job, problem, seed, network=poor_network(seed), compute=COMPUTE, faults=mixed_faults(seed),
        checkers=ledger_checkers(problem, epochs, once=False, heal_at_s=HEAL_AT_S),
    ).run()  # fmt: skip
    assert outcome.state == "finished"


class AsBefore(Replica):
    """Alg. 1.1 to the letter: step mod n, for an n that does not change."""

    def run(self) -> Needs:
        step = samples = 0
        while True:
            data = yield NextData()
            if data is not None:
                if step % self.options.fetch_every_steps == 0:
                    yield Read(wait=not self.options.overlap)
                computed = yield Gradient(step=self.has_inner)
                if computed is None:
                    continue
                self.accrue(computed.gradient)
                samples += computed.samples
            if samples and (data is None or step % self.options.push_every_steps == 0):
                yield self.write_residual(samples=samples)
                samples = 0
            step += data is not None


def conversation(kind: type[Replica], options: Options, seed: int) -> list[tuple[Any, ...]]:
    """What a replica asks for, with its vectors, while data ends and gradients are poisoned: never
    so many in a row that it takes itself for their cause.
    """
    left_out = 0
    rng = np.random.default_rng([seed, 3])
    side = kind(
        Site(
            options=options, parameters=np.zeros(3, np.float32), slot=0, layout=layout_of(3),
            rng=rng, members=frozenset({0}), has_inner=True,
        )
    )  # fmt: skip
    side.begin("new")
    asked: list[tuple[Any, ...]] = []
    generator = side.run()
    request = next(generator)
    for _ in range(400):
        asked.append((type(request), side.parameters.tobytes(), side.residual.tobytes()))
        answer: Any = None
        if isinstance(request, NextData):
            answer = None if rng.random() < 0.15 else object()
        elif isinstance(request, Gradient):
            gradient = rng.standard_normal(3).astype(np.float32)
            is_bad = rng.random() < 0.15 and left_out < DISCARDED_MAX - 1
            left_out = left_out + 1 if is_bad else 0
            answer = None if is_bad else Step(gradient, 8, 0.0)
        elif isinstance(request, Write):
            asked.append((request.samples,))
            side.residual[:] = 0
        request = generator.send(answer)
    return asked


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("fetch", "push"), [(1, 1), (3, 2), (2, 5), (7, 4)])
def test_with_numbers_a_replica_asks_for_the_same_as_with_step_mod_n(fetch, push, seed) -> None:
    options = Options(fetch_every_steps=fetch, push_every_steps=push)
    assert conversation(Replica, options, seed) == conversation(AsBefore, options, seed)


@pytest.mark.parametrize("compression", [("none", {}), ("topk", {"density": 0.2})])
def test_with_numbers_a_run_ends_with_the_same_weights_to_the_last_bit(
    compression, monkeypatch
) -> None:
    def run() -> Outcome:
        method = ("downpour", {"fetch_every_steps": 3, "push_every_steps": 2})
        job = job_file(3, 2, algorithm=method, compression=compression, epochs=3.0)
        network = NetworkOptions(link=SimLink(jitter_s=0.002, loss=0.02))
        return Simulation(job, LeastSquares(size=20), 7, network=network).run()

    now = run()
    monkeypatch.setattr(Component, "load", lambda entry: LOADED.get(entry.target) or LOAD(entry))
    before = run()
    sides = [outcome.world.machine("worker-0").training.side for outcome in (now, before)]
    assert [type(side) for side in sides] == [Replica, AsBefore]
    assert now.trace == before.trace
    assert np.array_equal(now.weights, before.weights)


LOAD = Component.load
LOADED = {"dlctl.algorithms.methods.downpour:DOWNPOUR": replace(DOWNPOUR, replica=AsBefore)}


def test_automatic_pushes_hold_all_that_was_accrued_since_the_last_one() -> None:
    pushes, waiting = Watcher(Push), Waiting()
    simulation(SLOW, pushes, waiting, seconds=6.0).run()
    messages = {p.seq: p for p in pushes.messages("worker-0")}
    steps = [(messages[seq].first_step, messages[seq].last_step) for seq in sorted(messages)]
    assert steps[0][0] == 0
    assert all(first == last + 1 for (_, last), (first, _) in pairwise(steps))
    assert all(
        messages[seq].samples == 8 * (last - first + 1)
        for seq, (first, last) in zip(sorted(messages), steps, strict=True)
    )
