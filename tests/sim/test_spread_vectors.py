"""Methods of replicas that are cut over processes come to what those of one process do: their
vectors are in parts, and each rank works on its own (`daemons/worker/ranks/spread_vectors.py`).
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import numpy as np
import pytest
from simulated import ACCOUNT, job_file, ledger_checkers

from daemons.worker.ranks import spread_vectors
from daemons.worker.ranks.rank_memory import RankMemory
from daemons.worker.ranks.spread_vectors import Share, SpreadVector, SpreadVectors
from dlctl import registry
from dlctl.compress.base import take
from dlctl.compress.plain import expand
from dlctl.compress.topk import TopK
from dlctl.model.vector import zeros_like
from dlctl.sim.drivers import ComputeDriver, ComputeOptions
from dlctl.sim.faults import Faults
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import LeastSquares, Ledger
from dlctl.sim.simulation import Simulation

RANKS = 3
SHARED = [
    name
    for name in registry.names("algorithms")
    for shape in [registry.load("algorithms", name).shape]
    if shape.needs_servers and not shape.engine and not any(t.of_rows for t in shape.tables)
]
COMPRESSORS = registry.names("compressors")


class Replicas:
    """Has the models of simulated replicas be in parts."""

    def __init__(self, patch: pytest.MonkeyPatch, compressor: str, options: dict[str, Any]) -> None:
        self.worked: set[str] = set()
        self.shares: list[Share] = []
        """Of the replica that was cut last."""
        self._kind = registry.load("compressors", compressor)
        self._options = self._kind.Options(**options)
        patch.setattr(spread_vectors, "ALIGNED", 4)  # Elements of a part: the models are small.
        build = ComputeDriver._build

        def cut_and_build(driver: Any, effect: Any) -> None:
            driver.parameters = self.cut(driver.parameters)
            driver._gradient = zeros_like(driver.parameters)
            driver._inner = driver._own(driver.parameters) if driver._own is not None else None
            build(driver, effect)

        patch.setattr(ComputeDriver, "_build", cut_and_build)

    def cut(self, values: Any) -> SpreadVector:
        file = os.memfd_create("replica", os.MFD_CLOEXEC)
        memories = [RankMemory(file, values.size) for _ in range(RANKS)]
        os.close(file)
        self.shares = shares = [
            Share(memory, rank, RANKS, self._kind(self._options))
            for rank, memory in enumerate(memories)
        ]
        assert all(share.lo < share.hi for share in shares)

        def work(order: Any) -> Any:
            self.worked.add(order["op"])
            return [share.work(**json.loads(json.dumps(order))) for share in shares]

        vectors = SpreadVectors(memories[0], shares[0], work, threading.RLock())
        vectors.parameters[:] = values
        return vectors.parameters


@pytest.mark.parametrize("name", SHARED)
def test_every_method_comes_to_the_same_in_parts(name: str, monkeypatch) -> None:
    known = registry.load("algorithms", name).Options.__dataclass_fields__
    wanted = {"local_steps": 4, "exchange_every_steps": 2, "buffer_pushes": 2}
    wanted |= {"target_samples": 24}
    options = {key: wanted[key] for key in wanted if key in known}

    def weights() -> Any:
        job = job_file(2, 2, algorithm=(name, options), epochs=6.0)
        return Simulation(job, LeastSquares(samples=64, size=24)).run()

    whole = weights()
    replicas = Replicas(monkeypatch, "none", {})
    parts = weights()
    assert parts.state == whole.state == "finished", parts.reason
    assert parts.weights.tobytes() == whole.weights.tobytes()
    assert "copy" in replicas.worked


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_each_rank_has_a_compressor_of_its_own(compressor: str, monkeypatch) -> None:
    kind = registry.load("compressors", compressor)
    known = kind.Options.__dataclass_fields__
    wanted = {"dense_below": 0, "density": 0.4, "side": 2, "keep": 2}
    options = {key: wanted[key] for key in wanted if key in known}
    replicas = Replicas(monkeypatch, compressor, options)
    job = job_file(2, 2, algorithm=("downpour", {}), epochs=32.0, compression=(compressor, options),
                   optimizer=("sgd", {"lr": 0.04}))  # fmt: skip
    problem = LeastSquares(samples=64, size=24)
    outcome = Simulation(job, problem).run()
    assert outcome.state == "finished", outcome.reason
    loss = problem.evaluate(outcome.weights)["loss"]
    assert loss <= 0.3 * problem.evaluate(problem.initial())["loss"]
    assert ("take" in replicas.worked) == (compressor != "none")


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("feedback", [False, True])
def test_without_feedback_no_rank_has_any_of_it_in_its_next_push(feedback, monkeypatch) -> None:
    """Servers' slices end within the parts of ranks."""
    options = {"density": 0.25, "dense_below": 0, "feedback": feedback}
    replicas = Replicas(monkeypatch, "topk", options)
    topk = TopK(TopK.Options(**options))
    u = zeros_like(replicas.cut(np.zeros(48, np.float32)))
    for gradient in np.random.default_rng(0).standard_normal((3, 48)).astype(np.float32):
        added = gradient + u if feedback else gradient
        u += gradient
        for shard, (lo, hi) in enumerate([(0, 22), (22, 48)]):
            sent = expand(TopK, take(topk, u[lo:hi], shard), hi - lo).dense(hi - lo)
            for share in replicas.shares:
                a, b = max(lo, share.lo), min(hi, share.hi)
                part = np.array(added[a:b])
                if part.size:
                    alone = TopK.expand(topk.take(part), part.size).dense(part.size)
                    np.testing.assert_array_equal(sent[a - lo : b - lo], alone)
                    np.testing.assert_array_equal(np.asarray(u)[a:b], part)
                    assert part.any() == feedback


@pytest.mark.parametrize("feedback", [False, True])
def test_a_vector_that_numpy_has_made_keeps_nothing_without_feedback(feedback, monkeypatch) -> None:
    """It is in no memory that ranks share: what they take they take from a copy."""
    options = {"density": 0.25, "dense_below": 0, "feedback": feedback}
    u = Replicas(monkeypatch, "topk", options).cut(np.arange(1, 49, dtype=np.float32))
    other = u[np.arange(48)]
    assert u.of.memory.place(other) is None
    before = np.array(other)
    sent = expand(TopK, take(TopK(TopK.Options(**options)), other, 0), 48).dense(48)
    assert np.count_nonzero(sent) == 12
    np.testing.assert_array_equal(sent[sent != 0], before[sent != 0])
    np.testing.assert_array_equal(other, before - sent if feedback else np.zeros(48))


@pytest.mark.parametrize("name", ["streaming-diloco", "decoupled-diloco"])
def test_a_shard_of_which_a_push_has_nothing_is_pushed_to(name: str, monkeypatch) -> None:
    replicas = Replicas(monkeypatch, "topk", {"dense_below": 0})
    job = job_file(2, 3, algorithm=(name, {"local_steps": 4}), epochs=6.0,
                   compression=("topk", {"dense_below": 0}))  # fmt: skip
    outcome = Simulation(job, LeastSquares(samples=64, size=24)).run()
    assert outcome.state == "finished", outcome.reason
    assert "take" in replicas.worked


@pytest.mark.parametrize("compressor", ["none", "topk"])
def test_what_ranks_have_taken_is_applied_once(compressor: str, monkeypatch) -> None:
    """Although messages are lost, repeated and late."""
    options = {"density": 0.005, "dense_below": 0} if compressor == "topk" else {}
    replicas = Replicas(monkeypatch, compressor, options)
    problem = Ledger(shards=2, cells=300)
    job = job_file(
        workers=2, servers=2, batch_size=4, portion_batches=2, epochs=2.0, optimizer=ACCOUNT,
        compression=(compressor, options),
    )  # fmt: skip
    poor = NetworkOptions(link=SimLink(jitter_s=0.002, loss=0.05, duplicate=0.05, reorder=0.1))
    checkers = ledger_checkers(problem, epochs=2, once=True)
    simulation = Simulation(job, problem, 3, network=poor, faults=Faults(heal_at_s=4.0),
                            compute=ComputeOptions(step_s=0.05), checkers=checkers)  # fmt: skip
    assert simulation.run().state == "finished"
    assert {"copy", "squares"} & replicas.worked


def test_a_process_that_is_forked_off_gives_nothing_of_it_back(monkeypatch) -> None:
    vector = Replicas(monkeypatch, "none", {}).cut(np.zeros(5000, np.float32))
    other = zeros_like(vector)
    other[:] = 7.0
    child = os.fork()
    if child == 0:
        del other
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (np.asarray(other) == 7.0).all()
