"""A replica of several processes is a replica: it trains as one process does with batches so much
larger, resumes, and loses nothing when one of its processes dies.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from group_loops import ACCOUNT, alone, torchrun, write_group
from workplace import Workplace

from dlctl.runs import checkpoints, lineage

SGD = '[optimizer]\nname = "sgd"\nlr = 1.0\n'
DILOCO = 'name = "diloco"\nlocal_steps = 4'
DOWNPOUR = 'name = "downpour"\npush_every_steps = 1\nfetch_every_steps = 1'
TOLERANCE = 1e-6


def _script(*args: object) -> str:
    listed = ", ".join(f'"{each}"' for each in args)
    return f'script = "train.py"\nargs = [{listed}]'


def _model(place: Workplace, kind: str) -> torch.Tensor:
    state = torch.load(place.path / f"{kind}.pt")
    return torch.cat([tensor.flatten() for tensor in state.values()])


def _saved(place: Workplace) -> np.ndarray:
    found = lineage.newest_good(place.directory)
    assert found is not None
    directory, manifest = found
    return np.asarray(checkpoints.read_slice(directory, manifest, "w", 0, manifest["size"]))


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_two_processes_without_a_run_are_one_with_batches_of_twice_the_size(
    place: Workplace, kind: str
) -> None:
    write_group(place, batch_size=8)
    of_two = torchrun(place, 2, kind, "sgd", "0")
    assert of_two.code == 0, of_two.said
    assert "rank 1 has made 16 steps with 256 samples: finished" in of_two.said
    write_group(place, batch_size=16)
    of_one = alone(place, "one", "sgd", "0")
    assert of_one.code == 0, of_one.said
    assert (_model(place, kind) - _model(place, "one")).abs().max() < TOLERANCE


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_run_that_was_stopped_and_started_again_is_one_process_without_a_run(
    place: Workplace, kind: str
) -> None:
    """DiLoCo with one worker and an outer SGD of rate 1; the optimizer's state is in the
    checkpoint, whole.
    """
    write_group(place, samples=768, batch_size=16)
    of_one = alone(place, "one", "adamw", "0")
    assert of_one.code == 0, of_one.said
    write_group(place, samples=768, batch_size=8)
    place.job(
        stop="{ epochs = 1 }", program=_script(kind, "adamw", 0.05), algorithm=DILOCO,
        optimizer=SGD, more_workers="processes = 2",
    )  # fmt: skip
    place.start()
    place.until_step(12, timeout_s=100.0)
    assert place.dlctl("stop").code == 0
    assert 12 <= place.run()["step"] < 44
    ended = place.dlctl("run", "job.toml", timeout_s=120.0)
    assert ended.code == 0, ended.err
    assert (place.run()["step"], place.run()["samples"]) == (48, 768)
    expected = _model(place, "one").numpy()
    assert np.abs(_saved(place) - expected).max() < 10 * TOLERANCE, "48 steps of AdamW"
    place.nothing_left()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "way", "victim", "phase"),
    [
        ("ddp", "gradients", 1, "step"),
        pytest.param("fsdp", "gradients", 1, "step", marks=pytest.mark.long),
        pytest.param("fsdp", "own", 1, "step", marks=pytest.mark.long),
        pytest.param("ddp", "own", 0, "step", marks=pytest.mark.long),
        pytest.param("fsdp", "own", 1, "join", marks=pytest.mark.long),
        pytest.param("fsdp", "own", 1, "evaluation", marks=pytest.mark.long),
        pytest.param("fsdp", "own", 1, "save", marks=pytest.mark.long),
        pytest.param("ddp", "own", 0, "save", marks=pytest.mark.long),
    ],
)
def test_each_sample_counts_once_although_a_process_of_a_replica_is_killed(
    place: Workplace, kind: str, way: str, victim: int, phase: str
) -> None:
    place.task(ACCOUNT)
    place.job(
        stop="{ epochs = 3 }", program=_script(kind, way, 0.05, victim, phase), optimizer=SGD,
        algorithm=DILOCO if way == "own" else DOWNPOUR, more_workers="processes = 2",
        checkpoint_every_s=2.0, more="\n[evaluation]\nevery_epochs = 0.5\n",
    )  # fmt: skip
    ended = place.dlctl("run", "job.toml", timeout_s=240.0)
    assert ended.code == 0, ended.err
    assert place.daemon("worker-0")["incarnation"] == 2
    assert place.run()["samples"] == 3 * 256
    cells = _saved(place)
    assert cells.min() == 3.0, "no acknowledged push is lost"
    # What a portion of 16 samples had in pushes comes again with it, as in any worker.
    assert cells.sum() - 3 * 256 == (8 if way == "gradients" else 0)
    said = place.dlctl("logs", "worker-0").out
    assert ("rank 1 of 2" in said) == (victim == 1)
    assert place.dlctl("verify").code == 0
    place.nothing_left()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_workers_of_two_processes_sum_their_gradients(place: Workplace, kind: str) -> None:
    write_group(place, batch_size=4)
    place.job(
        stop="{ epochs = 1 }", program=_script(kind, "mean", 0.01), workers=2, servers=0,
        algorithm='name = "allreduce"', optimizer="", more_workers="processes = 2",
    )  # fmt: skip
    ended = place.dlctl("run", "job.toml", timeout_s=120.0)
    assert ended.code == 0, ended.err
    assert place.run()["samples"] == 256
    said = place.dlctl("logs").out
    assert all(f"rank {rank} has made" in said for rank in range(2))
    place.nothing_left()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_four_processes_are_a_replica(place: Workplace, kind: str) -> None:
    write_group(place, batch_size=4)
    place.job(
        stop="{ epochs = 2 }", program=_script(kind, "adamw", 0.0), algorithm=DILOCO, optimizer="",
        more_workers="processes = 4", more="\n[evaluation]\nevery_epochs = 1.0\n",
    )  # fmt: skip
    ended = place.dlctl("run", "job.toml", timeout_s=200.0)
    assert ended.code == 0, ended.err
    assert (place.run()["step"], place.run()["samples"]) == (32, 512)
    assert place.run()["evaluation"]["val"] < 1.2
    place.nothing_left()
