"""A checkpoint that another method, or another optimiser, goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from of_torch import OfTorch
from simulated import job_file

from dlctl import registry
from dlctl.errors import UsageError
from dlctl.job import config
from dlctl.ops import translation
from dlctl.records import manifest
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.store import Store
from dlctl.wire.messages import Array

ADAM, OWN = ("adam", {"lr": 0.02}), ("adam", {"lr": 0.02})
MOMENTUM, OWN_MOMENTUM = ("momentum", {"lr": 0.01}), ("sgd", {"lr": 0.01, "momentum": 0.9})
SAMPLES, EPOCHS = 128, 3
OPTIONS = {"fedbuff": {"buffer_pushes": 2}, "target-batch": {"target_samples": 32}}
"""So short a run has not pushes enough for what the method comes with."""
COSINE = config.Schedule(kind="cosine", warmup="10%", over=f"{EPOCHS * SAMPLES} samples")


class OfStore:
    """The newest checkpoint of a simulated run."""

    def __init__(self, store: Store) -> None:
        self.directory = store.newest()
        self.manifest = store.manifests[self.directory]
        self._store, self._files = store, store.files[self.directory]

    def read(self, tensor: str, lo: int, hi: int) -> Array:
        return self._store.read_slice(self.directory, tensor, lo, hi)

    def averaged(self) -> Array:
        return self._files[self.manifest["shards"][0]["file"]]["averaged"]

    def worker(self, name: str) -> Mapping[str, Array]:
        files = [part["file"] for part in self.manifest["workers"] if part["name"] == name]
        return self._files[files[0]] if files else {}


def translated(store: Store, job: config.JobFile) -> tuple[Store, translation.Translation]:
    source, made = OfStore(store), Store()
    moved = translation.translated(source, job)
    written = {
        part.file: dict(zip(
            ("sha256", "nbytes"), made.write(source.directory, part.file, part.arrays()),
            strict=True,
        ))
        for part in moved.parts
    }  # fmt: skip
    made.manifests[source.directory] = moved.completed(written)
    manifest.check(moved.completed(written) | {"schema": manifest.SCHEMA, "at": 0.0})
    return made, moved


def a_job(name: str, epochs: int, **more: Any) -> config.JobFile:
    """Two replicas, because a sum of three depends on who has computed what."""
    method = registry.load("algorithms", name)
    job = job_file(
        2, 2 if method.shape.needs_servers else 0, epochs=float(epochs),
        **{"algorithm": (name, OPTIONS.get(name, {})), "schedule": COSINE, **more},
    )  # fmt: skip
    return replace(job, data=config.Data(portion_batches=1, lease_ahead_s=0.0))


def run(job: config.JobFile, store: Store | None = None) -> Outcome:
    made = partial(partial, OfTorch) if job.inner.options.keys() - {"lr"} else None
    more: dict[str, Any] = {} if made is None else {"inner": made}
    outcome = Simulation(job, LeastSquares(samples=SAMPLES), store=store, **more).run()
    assert outcome.state == "finished", outcome.reason
    return outcome


@pytest.mark.parametrize(("servers", "own"), [(ADAM, OWN), (MOMENTUM, OWN_MOMENTUM)])
@pytest.mark.parametrize("first", ["sync", "allreduce"])
def test_sync_and_allreduce_go_on_with_each_other_s_optimiser(first, servers, own) -> None:
    """As if one of them had gone the whole way, with its schedule and the rest of the data."""
    jobs = {
        "sync": lambda epochs: a_job("sync", epochs, optimizer=servers),
        "allreduce": lambda epochs: a_job("allreduce", epochs, inner=own),
    }
    (second,) = jobs.keys() - {first}
    store, moved = translated(run(jobs[first](1)).store, jobs[second](EPOCHS))
    assert (moved.keeps, moved.afresh) == ((servers if second == "sync" else own)[0], ())
    other = run(jobs[second](EPOCHS), store)
    whole = run(jobs["sync"](EPOCHS))
    assert other.store.run["samples"] == whole.store.run["samples"] == EPOCHS * SAMPLES
    np.testing.assert_allclose(other.weights, whole.weights, atol=1e-6)


def test_an_optimiser_without_a_counterpart_begins_afresh_and_that_is_said() -> None:
    stopped = run(a_job("sync", 1, optimizer=ADAM)).store
    job = a_job("allreduce", EPOCHS, inner=OWN_MOMENTUM)
    store, moved = translated(stopped, job)
    assert (moved.keeps, moved.afresh) == ("", ("sgd in the replicas",))
    saved = store.files[store.newest()]["worker-0.safetensors"]
    assert not any(name.startswith("inner.") for name in saved)
    run(job, store)
    _, moved = translated(stopped, a_job("sync", EPOCHS, optimizer=("adagrad", {"lr": 0.1})))
    assert (moved.keeps, moved.afresh) == ("", ("adagrad in the servers",))
    compressed = {"optimizer": ADAM, "compression": ("topk", {"density": 0.25})}
    stopped = run(a_job("sync", 1, **compressed)).store
    _, moved = translated(stopped, a_job("downpour", EPOCHS, **compressed))
    assert (moved.keeps, moved.afresh) == ("adam", ("the replicas' residual",))


NAMES = registry.names("algorithms")


@pytest.mark.per_commit(2)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("sync", "sandblaster")])
def test_every_method_goes_on_with_a_model_of_sync_and_sync_with_its_own(name) -> None:
    first, job = run(a_job("sync", 1)), a_job(name, 2)
    there, _ = translated(first.store, job)
    assert np.array_equal(OfStore(there).read("w", 0, first.weights.size), first.weights)
    second = run(job, there)
    assert second.store.run["samples"] == 2 * SAMPLES
    back, _ = translated(second.store, a_job("sync", EPOCHS))
    assert run(a_job("sync", EPOCHS), back).store.run["samples"] == EPOCHS * SAMPLES


def test_what_a_driving_coordinator_keeps_is_in_no_other_checkpoint() -> None:
    job = a_job("sandblaster", 2)
    with pytest.raises(UsageError, match="coordinator"):
        translated(run(a_job("sync", 1)).store, job)
