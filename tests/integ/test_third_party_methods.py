"""Methods that are installed beside dlctl: each is one file and one entry point."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file
from workplace import ENDLESS, SLOW_S, Workplace

TOYS = Path(__file__).parents[1] / "toys"


@pytest.fixture
def place(place: Workplace) -> Workplace:
    """The same, with the toys installed."""
    place.env["PYTHONPATH"] += os.pathsep + str(TOYS)
    place.task(pause_s=SLOW_S)
    return place


def algorithm(name: str) -> str:
    return f'name = "{name}"'


@contextmanager
def replaced(place: Workplace, name: str) -> Iterator[int]:
    """Its process ends inside, whose pid this is; returns when another one of it is at work."""
    before = place.pid(name)
    yield before

    def is_replaced() -> bool:
        row = place.run() if name == "coordinator" else place.daemon(name)
        at_work = row.get("state") in ("running", "degraded")
        return at_work and row.get("pid") not in (None, before)

    place.until(f"another {name}", is_replaced)


def kill(place: Workplace, name: str, number: int = signal.SIGKILL) -> None:
    """Kill a daemon, or stop it; returns when another process of it is at work."""
    with replaced(place, name) as pid:
        os.kill(pid, number)


def logged(place: Workplace, name: str) -> str:
    """All logs of a daemon."""
    return "".join(file.read_text() for file in place.directory.glob(f"logs/{name}.*.jsonl"))


def stop(place: Workplace) -> None:
    """End the run in order, a while after all that was done to it."""
    place.until_step(place.run()["step"] + 64)
    ended = place.dlctl("stop")
    assert ended.code == 0, ended.err
    assert place.run()["state"] == "stopped", place.story()


def kept(place: Workplace, file: str) -> dict[str, np.ndarray]:
    """The arrays of one file of the newest checkpoint."""
    checkpoints = sorted((place.directory / "ckpt").glob("*/manifest.json"))
    assert checkpoints, place.story()
    return load_file(checkpoints[-1].parent / file)


def test_one_is_listed_trains_is_set_live_and_survives_a_kill(place: Workplace) -> None:
    listed = place.dlctl("algorithms", "toy-clock")
    assert listed.code == 0, listed.err
    assert "staleness" in listed.out
    place.job(stop=ENDLESS, workers=2, servers=2, algorithm=algorithm("toy-clock"))
    place.start()
    place.until_step(8)
    changed = place.dlctl("set", "worker-*", "staleness=3")
    assert changed.code == 0, changed.err
    refused = place.dlctl("set", "worker-*", "staleness=none", "log_level=debug")
    assert refused.code == 2
    got = json.loads(place.dlctl("get", "worker-0", "--json").out)
    assert "debug" not in json.dumps(got), "a refused change is refused as a whole"
    assert '"staleness": 3' in json.dumps(got)
    kill(place, "worker-1")
    stop(place)
    place.nothing_left()


@pytest.mark.long
def test_a_second_table_survives_the_deaths_of_server_worker_and_coordinator(
    place: Workplace,
) -> None:
    place.job(stop=ENDLESS, workers=2, servers=2, algorithm=algorithm("toy-table"))
    place.start()
    place.until_step(8)
    for name in ("server-1", "coordinator", "worker-1"):
        kill(place, name)
    stop(place)
    seen = np.concatenate([kept(place, f"shard-{k}.safetensors")["table.seen"] for k in (0, 1)])
    # Each push adds as much to the cell of its slot as to the last one, in another shard.
    assert seen[:-1].sum() == seen[-1] >= 8 * place.run()["step"]
    assert (seen[:2] > 0).all()
    place.nothing_left()


@pytest.mark.long
def test_replicas_that_ask_each_other_need_no_servers(place: Workplace) -> None:
    place.job(stop=ENDLESS, workers=3, servers=0, algorithm=algorithm("toy-ring"))
    place.start()
    place.until_step(8)
    kill(place, "worker-1")
    stop(place)
    assert place.run()["evaluation"]["accuracy"] >= 0.85
    models = [kept(place, f"worker-{slot}.safetensors")["w"] for slot in range(3)]
    apart = max(np.abs(model - models[0]).max() for model in models)
    assert 0 < apart < 0.5 * np.abs(models[0]).max(), "they go on from each other's models"
    exported = place.dlctl("checkpoint", "export", "-o", "model.safetensors")
    assert exported.code == 0, exported.err
    assert set(load_file(place.path / "model.safetensors")) == {
        "0.weight", "0.bias", "2.weight", "2.bias",
    }  # fmt: skip
    place.nothing_left()


@pytest.mark.long
def test_a_group_makes_its_sums_without_servers_and_without_the_dead(place: Workplace) -> None:
    place.job(stop=ENDLESS, workers=3, servers=0, algorithm=algorithm("toy-group"))
    place.start()
    place.until_step(8)
    kill(place, "worker-1")
    stop(place)
    assert place.run()["evaluation"]["accuracy"] >= 0.85
    place.nothing_left()


def rank_of(place: Workplace) -> int:
    """The pid of rank 1 of the only replica."""
    found = [p.pid for p in place.processes() if "daemons.worker.later_rank" in p.cmdline()]
    assert len(found) == 1, place.story()
    return found[0]


@pytest.mark.long
def test_a_replica_of_several_processes_lives_and_dies_with_all_of_them(place: Workplace) -> None:
    place.job(stop=ENDLESS, algorithm=algorithm("toy-engine"), more_workers="processes = 2")
    place.start()
    place.until_step(8)
    first = rank_of(place)
    with replaced(place, "worker-0"):
        os.kill(first, signal.SIGKILL)
    assert f"(pid {first}) was killed by SIGKILL" in logged(place, "worker-0")
    second = rank_of(place)
    with replaced(place, "worker-0") as pid:
        os.kill(pid, signal.SIGKILL)
        place.until("its rank has ended, too", lambda: not is_there(second), timeout_s=1.0)
    stop(place)
    saved = kept(place, "worker-0.safetensors")
    # Both ranks have made every operation, and each has given its range of the state.
    steps = saved["engine.steps"]
    assert steps[0] == steps[1] > 0 == steps[2:].max()
    assert (saved["engine.v"] > 0).all()
    place.nothing_left()


def is_there(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.long
def test_a_group_goes_on_without_a_member_that_hangs(place: Workplace) -> None:
    """It is killed for its silence, and replaced by one that is given the model."""
    limit = "[timeouts]\nsilent_s = 4.0\n"
    place.job(stop=ENDLESS, workers=3, servers=0, algorithm=algorithm("toy-group"), more=limit)
    place.start()
    place.until_step(8)
    kill(place, "worker-0", signal.SIGSTOP)
    stop(place)
    assert " 4 s" in place.dlctl("events").out
    place.nothing_left()


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_group_that_has_lost_its_model_says_so_and_is_recovered(place: Workplace) -> None:
    place.job(stop=ENDLESS, workers=2, servers=0, algorithm=algorithm("toy-group"))
    place.start()
    place.until_step(8)
    assert place.dlctl("checkpoint").code == 0
    place.until_step(place.run()["step"] + 8)
    for pid in [place.pid(f"worker-{slot}") for slot in range(2)]:
        os.kill(pid, signal.SIGKILL)
    place.until("its end", lambda: place.run()["state"] == "failed" and place.run()["ended_at"])
    assert "all replicas that had the model have ended" in place.run()["reason"]
    assert "dlctl recover" in place.run()["reason"]
    recovered = place.dlctl("recover")
    assert recovered.code == 0, recovered.err
    place.until_step(place.run()["step"] + 8)
    stop(place)
    place.nothing_left()


@pytest.mark.long
def test_all_servers_use_the_same_pushes_though_worker_server_and_coordinator_die(
    place: Workplace,
) -> None:
    """A replica that found a push used on one shard and dropped on the other would fail."""
    table = algorithm("toy-quorum") + "\nbackups = 1"
    place.job(stop=ENDLESS, workers=3, servers=2, algorithm=table)
    place.start()
    place.until_step(8)
    for name in ("worker-1", "server-1", "coordinator"):
        kill(place, name)
    stop(place)
    assert [place.daemon(f"worker-{slot}")["restarts"] for slot in range(3)] == [0, 1, 0]
    place.nothing_left()
