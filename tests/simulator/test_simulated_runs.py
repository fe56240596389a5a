"""`dlctl simulate`: the user's task in virtual time, next to the same job on real daemons."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file
from split_parties import write
from workplace import COMMAND, Workplace

from dlctl.records.work_times import FOLDER

TASK = """
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

class Task:
    def model(self):
        return nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)
        )

    def dataset(self):
        generator = torch.Generator().manual_seed(1)
        label = torch.randint(0, 2, (256,), generator=generator)
        return TensorDataset(torch.randn(256, 8, generator=generator) + label[:, None], label)

    def loss(self, model, batch):
        points, label = batch
        return functional.cross_entropy(model(points), label)

    def evaluate(self, model):
        points, label = self.dataset().tensors
        return {"accuracy": (model(points).argmax(1) == label).float().mean()}

task = Task()
"""
SYNC = 'name = "sync"'
DAEMONS = ("agent-0", "coordinator", "server-0", "worker-0", "worker-1")
ADAMW = '[optimizer]\nname = "adamw"\nlr = 0.01\n'


@pytest.fixture
def place() -> Iterator[Workplace]:
    place = Workplace()
    place.task(TASK)
    yield place
    place.close()


def simulated(place: Workplace, *arguments: str) -> dict[str, Any]:
    ended = place.dlctl("simulate", "job.toml", "--json", *arguments)
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def weights(directory: Path) -> np.ndarray:
    (file,) = directory.glob("ckpt/*/shard-0.safetensors")
    return load_file(file)["w"]


def test_one_worker_ends_with_the_weights_of_a_real_run(place: Workplace) -> None:
    place.job(algorithm=SYNC, optimizer=ADAMW)
    found = simulated(place, "--step", "5ms")
    assert found["state"] == "finished"
    ended = place.dlctl("run", "job.toml", timeout_s=120)
    assert ended.code == 0, ended.err
    assert np.array_equal(weights(Path(found["directory"])), weights(place.directory))


def test_a_seed_gives_the_same_run_and_readers_take_its_directory(place: Workplace) -> None:
    place.job(workers=3)
    arguments = ["--step", "5ms", "--link", "10Mbit/s,2ms", "--slow", "worker-1=3x"]
    arguments += ["--faults", "kill a worker every 1s"]
    first, second = (simulated(place, *arguments) for _ in range(2))
    assert first["simulated"]["digest"] == second["simulated"]["digest"]
    assert first["evaluations"] == second["evaluations"]
    assert first["simulated"]["killed"] > 0
    run = first["run_id"]
    status = json.loads(place.dlctl("status", "-j", run, "--json").out)
    assert status["simulated"]["step_s"] == 0.005
    for command in ("verify", "events", "logs"):
        ended = place.dlctl(command, "-j", run)
        assert ended.code == 0, ended.err
    assert "loss" in place.dlctl("report", "-j", run, "--output", "-").out
    # No command takes it for the job's run.
    assert place.dlctl("status").code != 0
    assert run not in place.dlctl("ps").out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--link", "fast"], "rate"),
        (["--slow", "server-0=2x"], "worker-3=3x"),
        (["--slow", "worker-9=2x"], "worker-9"),
        (["--slow", "worker-0=nanx"], "worker-3=3x"),
        (["--slow", "worker-0=1e300x"], "1000x"),
        (["--spread", "nan"], "--spread"),
        (["--spread", "1e9"], "--spread"),
        (["--faults", "flood"], "kill a worker"),
        (["--step", "soon"], "--step"),
        (["--parameters", "100"], "--protocol"),
        (["--protocol", "--faults", "kill a worker every 1s"], "--protocol"),
        (["--protocol", "--set", "algorithm.name=kfac", "--set", "servers.count=0"], "kfac"),
        (["--set", "algorithm.name=dilco"], "diloco"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    place: Workplace, command_at: Callable[..., Any], arguments: list[str], word: str
) -> None:
    place.job()
    ended = command_at(place, "simulate", "job.toml", *arguments)
    assert ended.code == 2, ended.err
    assert word in ended.err
    assert not list(place.path.glob("runs/*"))


def test_a_method_with_shared_memory_is_refused(
    place: Workplace, command_at: Callable[..., Any]
) -> None:
    place.job(servers=0, algorithm='name = "hogwild"', more="[inner]\nname = 'sgd'\nlr = 0.1\n")
    ended = command_at(place, "simulate", "job.toml")
    assert ended.code == 2
    assert "memory" in ended.err


def test_a_model_that_parties_divide_is_refused(
    place: Workplace, command_at: Callable[..., Any]
) -> None:
    write(place, 'shape = "u"')
    ended = command_at(place, "simulate", "job.toml")
    assert ended.code == 2
    assert ("[[parties]]" in ended.err, ended.err.count("error")) == (True, 1)


def test_an_error_of_the_task_is_told(place: Workplace) -> None:
    place.task(
        TASK.replace("return functional", "raise ValueError('broken')\n        return functional")
    )
    place.job()
    ended = place.dlctl("simulate", "job.toml", "--step", "5ms")
    assert ended.code == 7
    assert "broken" in ended.err


def test_a_simulation_takes_the_durations_of_a_run_and_replays_it(
    place: Workplace, command_at: Callable[..., Any]
) -> None:
    place.job(workers=2, stop="{ epochs = 4 }")
    assert place.dlctl("run", "job.toml", timeout_s=120).code == 0
    real = place.directory.name
    kept = {file.name for file in place.directory.glob(f"{FOLDER}/*.json")}
    assert kept == {f"{name}.1.json" for name in DAEMONS}
    found = simulated(place, "--like", real, "--workers", "3")
    figures = {error["name"]: error for error in found["replay"]["errors"]}
    assert figures["pushed bytes"]["error"] == pytest.approx(0.0, abs=0.05)
    assert figures["seconds"]["simulated"] > 0
    assert found["replay"]["expected_error"] >= max(0.05, abs(figures["seconds"]["error"]))
    assert found["simulated"]["waits"]["worker"]["wakes"] > 0
    assert len(list(place.path.glob("runs/*"))) == 2  # The replay is not kept.
    ended = command_at(place, "simulate", "job.toml", "--like", real, "--step", "5ms")
    assert ended.code == 2
    for file in place.directory.glob(f"{FOLDER}/*.json"):
        times = json.loads(file.read_text())
        if "step" in times["work"]:
            times["work"]["step"] |= {"count": 10, "histogram": [10]}  # As of a short run.
        file.write_text(json.dumps(times))
    ended = command_at(place, "simulate", "job.toml", "--like", real)
    assert ended.code == 2
    assert "50 are needed" in ended.err


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long)]
)
def test_a_simulation_ends_with_its_command(place: Workplace, number: int) -> None:
    """Its processes are started as for users: the companions of tests would end with them."""
    place.job(stop="{ epochs = 100000 }")
    argv = [*COMMAND, "simulate", "job.toml", "--step", "5ms"]
    with subprocess.Popen(argv, cwd=place.path, env=place.env) as command:
        of_it = psutil.Process(command.pid)
        place.until("it simulates", lambda: len(of_it.children(recursive=True)) > 1)
        processes = of_it.children(recursive=True)
        command.send_signal(number)
        gone, alive = psutil.wait_procs(processes, timeout=20)
        assert (len(gone), alive) == (len(processes), [])


def test_its_processes_end_when_it_is_done(place: Workplace) -> None:
    """One of them may have the lock of their queue when the others are ended."""
    place.job()
    argv = [*COMMAND, "simulate", "job.toml", "--step", "5ms"]
    ended = subprocess.run(argv, cwd=place.path, env=place.env, timeout=60, check=False)
    assert ended.returncode == 0


def test_without_gradients_it_is_told_what_saturates_first(place: Workplace) -> None:
    place.job(workers=2)
    arguments = ["--protocol", "--workers", "8", "--link", "100Mbit/s,1ms", "--step", "100ms"]
    arguments += ["--parameters", "1000000", "--until", "4s"]
    found = simulated(place, *arguments)
    assert [row["workers"] for row in found["windows"]] == [2, 8]
    row = found["windows"][-1]
    assert (row["trained"], row["seconds"]) == (8, pytest.approx(4.0, abs=0.01))
    # A push or a fetch of 4 MB takes a third of a second, three steps, of the server's card.
    assert found["saturates"]["kind"] == "link"
    assert found["saturates"]["workers"] < 2
    assert row["steps_per_s"] < 40  # Alone they would make 80.
    assert not list(place.path.glob("runs/*"))
