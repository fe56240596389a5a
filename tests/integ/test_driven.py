"""A method that the coordinator drives, on real daemons: one trajectory, whoever dies."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from safetensors.numpy import load_file
from workplace import ENDLESS, Workplace

ITERATIONS = 4
ALGORITHM = f'name = "sandblaster"\niterations = {ITERATIONS}\ngradient_norm_min = 0.0'
STEPS_PER_BATCH = 32


@pytest.mark.long
@pytest.mark.timeout(120)
def test_the_trajectory_does_not_depend_on_whose_death_comes_when(place: Workplace) -> None:
    """Two runs of one job: one that is left alone, one whose daemons are killed one by one."""
    alone = weights_after(place)
    disturbed = weights_after(place, "coordinator", "server-1", "worker-1")
    assert np.abs(disturbed - alone).max() <= 1e-4 * np.abs(alone).max(), place.story()
    place.nothing_left()


def weights_after(place: Workplace, *victims: str) -> np.ndarray:
    """float32[d]: the parameters of a new run at its end."""
    place.task(pause_s=0.03 if victims else 0.0)
    place.job(stop=ENDLESS, workers=2, servers=2, algorithm=ALGORITHM)
    place.start("--fresh")
    for number, name in enumerate(victims):
        place.until_step(STEPS_PER_BATCH * number + 10)
        os.kill(place.pid(name), signal.SIGKILL)
    place.until("its end", lambda: place.run().get("state") == "finished")
    figures = place.run()["method"]
    assert figures["iteration"] == ITERATIONS, place.story()
    assert figures["loss"] < 0.5
    deaths = [*place.events("lost"), *place.events("recover")]
    assert len(deaths) >= len(victims), place.story()
    checkpoint = max((place.directory / "ckpt").glob("*/manifest.json")).parent
    shards = [load_file(checkpoint / f"shard-{k}.safetensors")["w"] for k in (0, 1)]
    return np.concatenate(shards)
