"""Workers of one host that step in one model: real processes, which are killed."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from workplace import ENDLESS, SLOW_S, Workplace

from daemons.worker.hogwild.workers import MEMORY

HOGWILD = 'name = "hogwild"\nsteps_at_once = 4'
INNER = '[inner]\nname = "sgd"\nlr = 0.1\n'


def job(place: Workplace) -> None:
    place.job(ENDLESS, 2, servers=0, algorithm=HOGWILD, more=INNER)
    file = place.path / "job.toml"
    text = file.read_text().replace('[optimizer]\nname = "adagrad"\nlr = 0.1\n', "")
    file.write_text(text)


def memories(place: Workplace) -> dict[int, set[int]]:
    """Inode of such memory -> the processes of this place that have it open."""
    found: dict[int, set[int]] = {}
    for process in place.processes():
        for path in Path(f"/proc/{process.pid}/fd").glob("*"):
            with suppress(OSError):
                if MEMORY in os.readlink(path):
                    found.setdefault(path.stat().st_ino, set()).add(process.pid)
    return found


@pytest.mark.long
def test_a_worker_is_killed_and_its_successor_steps_in_the_same_memory(place: Workplace) -> None:
    place.task(pause_s=SLOW_S)
    job(place)
    place.start()
    place.until_step(8)
    first, killed = place.pid("worker-0"), place.pid("worker-1")
    ((memory, having),) = memories(place).items()
    assert having == {first, killed}
    os.kill(killed, signal.SIGKILL)
    place.until("it has a successor", lambda: place.daemon("worker-1").get("pid") != killed)
    place.until("which steps, too", lambda: place.daemon("worker-1")["metrics"].get("step"))
    assert memories(place) == {memory: {first, place.pid("worker-1")}}
    assert place.dlctl("stop").code == 0
    place.nothing_left()


@pytest.mark.long
def test_with_the_last_worker_the_memory_is_gone_and_the_checkpoint_is_not(
    place: Workplace,
) -> None:
    place.task(pause_s=SLOW_S)
    job(place)
    run = place.begin("run", "job.toml")
    place.until_step(40)
    assert place.dlctl("checkpoint").code == 0
    for name in ("worker-0", "worker-1"):
        os.kill(place.pid(name), signal.SIGKILL)
    ended = run.end()
    assert ended.code == 7, ended.err
    assert "all replicas that had the model have ended" in ended.err
    assert memories(place) == {}
    step = place.run()["checkpoint"]["step"]
    assert place.dlctl("recover").code == 0
    place.until_step(step + 20)
    (memory,) = memories(place)
    assert len(memories(place)[memory]) == 2
    assert place.dlctl("stop").code == 0
    place.nothing_left()


@pytest.mark.long
def test_a_replica_of_two_processes_dies_with_one_of_them_and_comes_back(place: Workplace) -> None:
    place.task(pause_s=SLOW_S)
    place.job(ENDLESS, workers=1, more="[replica]\nhogwild = 2\n")
    place.start()
    place.until_step(8)
    first = place.pid("worker-0")
    (rank,) = (p for p in place.processes() if "daemons.worker.later_rank" in p.cmdline())
    assert rank.ppid() == first
    rank.kill()
    place.until("it has a successor", lambda: place.daemon("worker-0").get("pid") != first)
    step = place.run()["step"]
    place.until_step(step + 20)
    assert place.dlctl("stop").code == 0
    place.nothing_left()
