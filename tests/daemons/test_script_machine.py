"""A script's share of its machine, by variables of its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemons.script import machine
from dlctl.job.config import Workers

CORES = 12


@pytest.mark.parametrize(
    ("workers", "gpus", "gets"),
    [
        (Workers(count=6), 4, {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "1"}),
        (Workers(count=100), 1, {"OMP_NUM_THREADS": "1"}),
        (Workers(count=6, threads=5), 0, {"OMP_NUM_THREADS": "5"}),
        (
            Workers(count=6, processes=2),
            4,
            {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "2,3"},
        ),
        (Workers(count=6, device="cpu"), 4, {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}),
    ],
)
def test_workers_are_spread_over_cores_and_gpus(
    workers: Workers, gpus: int, gets: dict[str, str]
) -> None:
    variables: dict[str, str] = {}
    machine.give_share(workers, 5, CORES, gpus, variables)
    assert variables == gets


def test_what_the_user_has_set_stays() -> None:
    mine = {"OMP_NUM_THREADS": "7", "CUDA_VISIBLE_DEVICES": "2,3"}
    variables = dict(mine)
    machine.give_share(Workers(count=2, threads=3), 0, CORES, 4, variables)
    assert variables == mine


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert machine.gpus(tmp_path) == 2
    assert machine.gpus(tmp_path / "absent") == 0
