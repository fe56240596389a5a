"""What a method's engine keeps goes on from a checkpoint, with the replica that it belongs to."""

from __future__ import annotations

import numpy as np
from simulated import job_file

from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.store import Store

SAMPLES, WORKERS, BATCH = 256, 3, 8


def run(store: Store, epochs: int) -> Outcome:
    job = job_file(
        workers=WORKERS, servers=2, algorithm=("toy-engine", {}), batch_size=BATCH,
        portion_batches=2, epochs=float(epochs), compression=("topk", {"density": 0.5}),
    )  # fmt: skip
    outcome = Simulation(job, LeastSquares(samples=SAMPLES), store=store).run()
    assert outcome.state == "finished", outcome.reason
    return outcome


def kept(store: Store) -> list[dict[str, np.ndarray]]:
    """The file of each worker in the newest checkpoint."""
    newest = max(store.manifests, key=lambda name: store.manifests[name]["number"])
    return [store.files[newest][f"worker-{slot}.safetensors"] for slot in range(WORKERS)]


def test_its_state_is_saved_with_the_replica_s_and_goes_on() -> None:
    store = Store()
    for epochs in (1, 3):
        run(store, epochs)
        saved = kept(store)
        # Operations are counted in the state itself, over both runs: one for every batch.
        assert sum(arrays["engine.steps"][0] for arrays in saved) == epochs * SAMPLES / BATCH
        assert all((arrays["engine.v"] > 0).all() for arrays in saved)
        assert all("residual" in arrays for arrays in saved)
