"""A run that was stopped and started again ends with the same bits as one that was not."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
from of_torch import OfTorch
from simulated import job_file

from dlctl import registry
from dlctl.algorithms.base import Method, Needs, ReplicaSide, Shape, Start
from dlctl.algorithms.needs import Done, Gradient
from dlctl.job import config
from dlctl.job.inner import SAVED_AS
from dlctl.model.vector import Vector
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.store import Store

FIXED = {
    "overlap": False, "local_steps": 4, "exchange_every_steps": 1, "buffer_pushes": 3,
    "target_samples": 1,
}  # fmt: skip
"""Options with which a trajectory does not depend on how long things take, and with which a portion
is a whole round."""


def is_in_step(method: Method) -> bool:
    """Whether all replicas compute on the same values, however fast each of them is."""
    has_barrier = method.shard is not None and method.shard.averages
    return has_barrier or "group" in method.shape.links


def run(name: str, workers: int, epochs: int, store: Store | None = None) -> Outcome:
    method = registry.load("algorithms", name)
    known = {field.name for field in dataclasses.fields(method.Options)}
    optimizers = method.shape.optimizers
    job = job_file(
        workers, 2 if method.shape.needs_servers else 0, epochs=float(epochs),
        algorithm=(name, {key: FIXED[key] for key in FIXED if key in known}),
        optimizer=("adam" if optimizers is None or "adam" in optimizers else "sgd", {"lr": 0.02}),
    )  # fmt: skip
    # What is leased ahead depends on who asks first; two replicas, because a sum of three depends
    # on who has computed what.
    data = config.Data(portion_batches=4, lease_ahead_s=0.0)
    outcome = Simulation(
        dataclasses.replace(job, data=data), LeastSquares(samples=128), store=store
    ).run()
    assert outcome.state == "finished", outcome.reason
    return outcome


EMPTIED = {"streaming-diloco", "decoupled-diloco", "loscar", "easgd-atomic"}
"""Before they stop, replicas exchange what they have without making steps."""
SUMMED = {"fedavg"}
"""What a replica pushes is a sum over all clients that it happened to have."""
CASES = [
    (name, workers)
    for name in registry.names("algorithms")
    for method in (registry.load("algorithms", name),)
    if name not in EMPTIED
    if not method.is_driven  # Those that the coordinator drives end where they want to.
    for workers in ((1, 2) if is_in_step(method) and name not in SUMMED else (1,))
]


@pytest.mark.per_commit(5)
@pytest.mark.parametrize(("name", "workers"), CASES)
def test_a_run_goes_on_from_its_end_as_if_it_had_never_stopped(name: str, workers: int) -> None:
    whole = run(name, workers, 3)
    stopped = run(name, workers, 1)
    assert not np.array_equal(stopped.weights, whole.weights)
    resumed = run(name, workers, 3, stopped.store)
    assert resumed.weights.tolist() == whole.weights.tolist()


def with_adamw(
    name: str, workers: int, epochs: int, store: Store | None = None, checkpoint_s: float = 0.0
) -> Outcome:
    """With a schedule over three epochs, in the replicas and on the servers."""
    known = {field.name for field in dataclasses.fields(registry.load("algorithms", name).Options)}
    job = job_file(
        workers, 2, epochs=float(epochs), optimizer=("adam", {"lr": 0.02}),
        algorithm=(name, {key: FIXED[key] for key in FIXED if key in known}),
        inner=("adamw", {"lr": 0.03}),
        schedule=config.Schedule(kind="cosine", warmup="10%", over="384 samples"),
        checkpoint_s=checkpoint_s,
    )  # fmt: skip
    data = config.Data(portion_batches=4, lease_ahead_s=0.0)
    outcome = Simulation(
        dataclasses.replace(job, data=data), LeastSquares(samples=128), store=store,
        inner=lambda choice: partial(OfTorch, choice),
    ).run()  # fmt: skip
    assert outcome.state == "finished", outcome.reason
    return outcome


@pytest.mark.parametrize(
    ("name", "workers"), [("downpour", 1), ("local-sgd", 1), ("diloco", 1), ("easgd", 1)]
)
def test_own_optimisers_and_schedules_go_on_as_if_a_run_had_never_stopped(
    name: str, workers: int
) -> None:
    """One replica: of two, each would have to compute the same data again."""
    whole = with_adamw(name, workers, 3)
    stopped = with_adamw(name, workers, 1)
    saved = stopped.store.files[stopped.store.newest()]["worker-0.safetensors"]
    assert any(key.startswith(SAVED_AS) for key in saved)
    resumed = with_adamw(name, workers, 3, stopped.store)
    assert resumed.weights.tolist() == whole.weights.tolist()


def test_what_torch_keeps_is_saved_without_a_copy_and_no_step_is_made_meanwhile() -> None:
    """The simulator looks whether what is saved changes before it is written."""
    outcome = with_adamw("diloco", 2, 3, checkpoint_s=0.05)
    assert int(outcome.store.newest().rpartition("-")[2]) >= 2


class Wanderer(ReplicaSide):
    """Heavy ball with noise, alone: it goes on as it would have only with both of its states."""

    def begin(self, start: Start) -> None:
        self.residual = self.residual[:0]
        self.velocity = np.zeros_like(self.parameters)

    def state(self) -> dict[str, Vector]:
        return {"velocity": self.velocity}

    def restore(self, state: Any) -> None:
        self.velocity[:] = state["velocity"]

    def run(self) -> Needs:
        while True:
            if (step := (yield Gradient())) is None:
                continue
            self.velocity *= np.float32(0.9)
            self.velocity += step.gradient
            noise = self.rng.standard_normal(len(self.velocity)).astype("f4")
            self.parameters -= np.float32(0.01) * (self.velocity + noise)
            yield Done()


class Forgetful(Wanderer):
    def restore(self, state: Any) -> None:
        pass


class Greedy(Wanderer):
    def state(self) -> dict[str, Vector]:
        return {"w": self.velocity}


@dataclasses.dataclass(slots=True, kw_only=True)
class Options:
    pass


def alone(replica: type[ReplicaSide]) -> Method:
    return Method(
        Options=Options,
        replica=replica,
        shape=Shape(tables=(), model="replica", survives=frozenset({"worker", "coordinator"})),
    )


WANDERER, FORGETFUL, GREEDY = alone(Wanderer), alone(Forgetful), alone(Greedy)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("wanderer", "forgetful", "greedy"):
        entry = registry.Component(f"{__name__}:{name.upper()}", "")
        monkeypatch.setitem(registry.BUILT_IN["algorithms"], name, entry)
    return "wanderer"


def test_a_replica_s_named_state_and_its_dice_go_on(named: str) -> None:
    whole = run(named, 1, 3)
    resumed = run(named, 1, 3, run(named, 1, 1).store)
    assert resumed.weights.tolist() == whole.weights.tolist()


def test_this_would_be_seen_if_it_were_not_so(named: str) -> None:
    resumed = run("forgetful", 1, 3, run("forgetful", 1, 1).store)
    assert resumed.weights.tolist() != run(named, 1, 3).weights.tolist()


def test_a_state_may_not_have_the_names_of_the_model(named: str) -> None:
    with pytest.raises(TypeError, match=r"state\(\).*\['w'\]"):
        run("greedy", 1, 1)
