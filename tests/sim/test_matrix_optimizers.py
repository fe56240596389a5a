"""Optimisers of matrices on the servers: as one process with the mean gradient, whoever dies, and
however the matrices are spread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from matrix_formulas import ByFormula
from simulated import job_file, rows_in_order

from dlctl import registry
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.optim.matrices_and_adam import MatricesAndAdam
from dlctl.sim.crashpoints import PointCrash
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.faults import Faults
from dlctl.sim.objectives import Batch, LeastSquares
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.store import Store

SAMPLES = 256
SHAPES = [(5, 5), (7,), (4, 4), (3, 3), (6,)]
"""Square: the first gradient then has full rank on both sides, and its eigenvectors are unique."""
OPTIONS: dict[str, dict[str, Any]] = {
    "muon": {"lr": 0.02},
    "soap": {"lr": 0.02, "frequency": 3},
    "shampoo": {"lr": 0.02, "frequency": 2},
    "lmo": {"lr": 0.02},
    "isotropic": {"lr": 0.02},
}
STEADY = ComputeOptions(step_s=0.1)
NAMES = pytest.mark.parametrize("name", [*OPTIONS])


class Matrices(LeastSquares):
    """Least squares whose parameters are called matrices and biases."""

    def __init__(self) -> None:
        super().__init__(SAMPLES, sum(int(np.prod(shape)) for shape in SHAPES))
        entries = (TensorEntry(f"{n}", TRAINED, shape, "float32") for n, shape in enumerate(SHAPES))
        self.layout = Layout(tuple(entries))


def by_hand(name: str, epochs: int) -> tuple[np.ndarray, ByFormula]:
    """One process with the batches of all workers."""
    problem, kind = Matrices(), registry.load("optimizers", name)
    made = kind(kind.Options(**OPTIONS[name]))
    options = {key: getattr(made.options, key) for key in type(made.options).__dataclass_fields__}
    scale = made.adam_rate() if isinstance(made, MatricesAndAdam) else 1.0
    optimizer = ByFormula(name, options, SHAPES, options["lr"] * scale)
    w = torch.from_numpy(problem.initial().astype(np.float64))
    for number, rows in enumerate(rows_in_order(job_file(batch_size=32), SAMPLES, epochs)):
        g = problem.gradient(w.numpy().astype(np.float32), Batch(rows, 0, 1, number))[1]
        w = optimizer.step(w, torch.from_numpy(g.astype(np.float64)))
    return w.numpy(), optimizer


def run(
    name: str, servers: int, epochs: int = 4, *, store: Store | None = None, victim: str = "",
    durability: Any = "process",
) -> Outcome:  # fmt: skip
    job = job_file(
        4, servers, batch_size=8, portion_batches=1, epochs=float(epochs), algorithm=("sync", {}),
        optimizer=(name, dict(OPTIONS[name])), durability=durability,
    )  # fmt: skip
    simulation = Simulation(job, Matrices(), store=store or Store(), compute=STEADY)
    if victim:
        for at_s in (1.0, 3.0):
            simulation.at(at_s, lambda: simulation.world.kill(victim))
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.reason
    return outcome


def kept_of(outcome: Outcome, servers: int) -> dict[str, np.ndarray]:
    """All that the servers keep beside matrices, concatenated."""
    found = [outcome.world.machine(f"server-{i}").serving.shard.storage for i in range(servers)]
    return {n: np.concatenate([storage.kept[n] for storage in found]) for n in found[0].kept}


@pytest.mark.oracle("sync", "optimisers of matrices, of one process in float64")
@NAMES
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_it_is_one_process_with_the_mean_gradient(name: str, servers: int, agree: Any) -> None:
    outcome = run(name, servers)
    expected, _ = by_hand(name, 4)
    assert np.abs(expected).max() > 0.1
    agree(outcome.weights, expected, atol=1e-5)
    shards = [outcome.world.machine(f"server-{i}").serving.parameters for i in range(servers)]
    starts = np.cumsum([0, *(int(np.prod(shape)) for shape in SHAPES)])
    for table in shards:
        within = [n for n, at in enumerate(starts[:-1]) if at < table.lo < starts[n + 1]]
        assert not within or len(SHAPES[within[0]]) == 1, "only a bias is divided"


@NAMES
@pytest.mark.parametrize("durability", ["process", "disk"])
def test_a_server_that_is_killed_goes_on_where_it_was(name: str, durability: str) -> None:
    outcome = run(name, 2, victim="server-0", durability=durability)
    expected, _ = by_hand(name, 4)
    assert np.allclose(outcome.weights, expected, rtol=0, atol=1e-5)
    assert outcome.world.machine("server-0").serving.term == 3


@NAMES
@pytest.mark.parametrize("durability", ["process", "disk"])
@pytest.mark.parametrize("seed", range(8))
def test_servers_die_at_any_time(name: str, durability: Any, seed: int) -> None:
    """Also in the middle of an update or a commit; the coordinator dies, too."""
    job = job_file(
        3, 2, batch_size=8, portion_batches=1, epochs=3.0, algorithm=("sync", {}),
        optimizer=(name, dict(OPTIONS[name])), durability=durability, restarts_max=20,
    )  # fmt: skip
    points = {
        "process": ("block updated", "commit half written", "commit written"),
        "disk": ("commit begun", "record written", "base written"),
    }[durability]
    crashes = tuple(
        PointCrash(name=f"server-{seed % 2}", point=point, count=4 + 3 * number + seed)
        for number, point in enumerate(points)
    )
    faults = Faults(
        server_kills=2, coordinator_kills=1, from_s=0.6, heal_at_s=4.0, points=crashes
    )  # fmt: skip
    seen = []
    for each in (Faults(), faults):
        simulation = Simulation(job, Matrices(), seed, faults=each, compute=STEADY)
        outcome = simulation.run(300.0)
        assert outcome.state == "finished", outcome.reason
        seen.append(outcome.weights)
    assert outcome.world.crash_points.crashes
    assert np.allclose(*seen, rtol=0, atol=1e-5)


@NAMES
@pytest.mark.parametrize("cut", [(2, 3), (3, 1)])
def test_matrices_take_along_what_is_kept_beside_them(name: str, cut: tuple[int, int]) -> None:
    store = Store()
    for servers, epochs in zip(cut, (3, 6), strict=True):
        outcome = run(name, servers, epochs, store=store)
        expected, by_formula = by_hand(name, epochs)
        assert np.allclose(outcome.weights, expected, rtol=0, atol=2e-5)
        kept = kept_of(outcome, servers)
        for side in {"L", "R"} & kept.keys():
            theirs = [state[side].numpy().ravel() for state in by_formula.states if side in state]
            assert np.allclose(kept[side], np.concatenate(theirs), rtol=1e-4, atol=1e-6)


def test_more_servers_than_matrices_are_refused_by_name() -> None:
    job = job_file(1, 17, algorithm=("sync", {}), optimizer=("muon", {}))
    outcome = Simulation(job, Matrices()).run()
    assert outcome.state == "failed"
    assert "count = 16" in outcome.reason
    assert "0, 1, 2" in outcome.reason
