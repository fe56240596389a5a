"""K-FAC on real processes, while workers and the coordinator are killed."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from safetensors.numpy import load_file
from workplace import Workplace

PAUSE_S = 0.04
SETTINGS = """name = "kfac"
factor_steps = 1
eigen_steps = 2
damping = 0.1
placement = "{placement}"
[inner]
name = "sgd"
lr = 0.1
momentum = 0.9
"""


def killed(place: Workplace, name: str) -> None:
    """Kill a daemon; returns when another process of it is at work."""
    before = place.pid(name)
    os.kill(before, signal.SIGKILL)

    def is_replaced() -> bool:
        row = place.run() if name == "coordinator" else place.daemon(name)
        at_work = row.get("state") in ("running", "degraded")
        return at_work and row.get("pid") not in (None, before)

    place.until(f"another {name}", is_replaced)


@pytest.mark.long
@pytest.mark.parametrize("placement", ["opt", "lw"])
def test_all_replicas_have_one_model_though_each_kind_of_daemon_was_killed(
    place: Workplace, placement: str
) -> None:
    """Each worker dies once, so each owner of an eigendecomposition does, too."""
    place.task(pause_s=PAUSE_S, samples=2048)
    place.job(
        stop="{ epochs = 5 }", workers=3, servers=0, algorithm=SETTINGS.format(placement=placement)
    )
    run = place.begin("run", "job.toml")
    place.until_step(20)
    for name in ("worker-1", "worker-0", "coordinator", "worker-2"):
        killed(place, name)
        place.until_step(place.run()["step"] + 12)
    ended = run.end()
    assert ended.code == 0, ended.err
    assert place.run()["evaluation"]["accuracy"] >= 0.85
    rows = [place.daemon(f"worker-{slot}") for slot in range(3)]
    assert {row["metrics"]["method"]["layers"] for row in rows} == {2}
    (manifest,) = (place.directory / "ckpt").glob("*/manifest.json")
    every = [load_file(manifest.parent / f"worker-{slot}.safetensors") for slot in range(3)]
    shared = ["w", "progress", "owners", "numbers"] + ["engine.kfac"] * (placement == "opt")
    for key in shared:
        assert all(np.array_equal(each[key], every[0][key]) for each in every), key
    place.nothing_left()


@pytest.mark.long
def test_it_trains_in_half_precision(place: Workplace) -> None:
    """The loss scale is not in the factors: else the steps would be of another length."""
    place.task(samples=2048)
    algorithm = SETTINGS.format(placement="opt") + '[gradient]\nprecision = "fp16"\n'
    place.job(stop="{ epochs = 5 }", workers=2, servers=0, algorithm=algorithm)
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 0, ended.err
    assert place.run()["evaluation"]["accuracy"] >= 0.85
    place.nothing_left()
