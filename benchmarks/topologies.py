"""One run for each topology on the digits, with a member killed with SIGKILL halfway.

Servers; replicas that sum, average in pairs, or share one model; replicas of several processes
(FSDP2, tensor parallelism, stages, steps without locks), of which one process is killed. The figure
is the quality of the final model, with the number of restarts and the time of the run. Also: the
step rate of the others while one replica of `gossip` is paused (SIGSTOP), which blocks no other.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.figures import Figure
from benchmarks.sandbox import Dlctl, sandbox
from dlctl.runs import database

CHAPTER = "topologies"
EXAMPLE = Path(__file__).parents[1] / "examples" / "digits"
WRONG_ASKED, LIMIT_S, LOOK_S = 5.0, 180.0, 0.3
KILL_AFTER = 12_000
"""In samples; an epoch has 1,437."""
PLAN = """

def tensor_plan(model):
    return {"0": "colwise", "2": "rowwise"}


task.tensor_plan = tensor_plan
"""


class Run(NamedTuple):
    algorithm: str
    sections: str = '[inner]\nname = "adamw"\nlr = 3e-3\n'
    servers: int = 0
    workers: int = 3
    is_rank: bool = False
    """Kill a later process of worker-1's replica, not worker-1 itself."""
    kills: str = "worker-1"
    epochs: int = 30


SGD = '[inner]\nname = "sgd"\nlr = 0.05\n'
SYNC = '[optimizer]\nname = "adamw"\nlr = 3e-3\n'


def _cut(algorithm: str, sections: str) -> Run:
    """Two replicas of two processes each."""
    return Run(f'name = "{algorithm}"', sections, servers=2, workers=2, is_rank=True)


RUNS = {
    "sync, worker": Run('name = "sync"', SYNC, 2),
    "sync, server": Run('name = "sync"', SYNC, 2, kills="server-1"),
    "allreduce": Run('name = "allreduce"'),
    "allreduce, powersgd": Run('name = "allreduce"\nhook = "powersgd"\npowersgd_after_steps = 50'),
    "gossip": Run('name = "gossip"'),
    "noloco": Run('name = "noloco"\nlocal_steps = 4'),
    # The others take 10 s and more; 30 epochs of this one can end between two looks at its status.
    "hogwild": Run('name = "hogwild"', SGD, epochs=90),
    "downpour, hogwild = 2": _cut("downpour", SGD + "[replica]\nhogwild = 2\n"),
    "sync, fsdp = 2": _cut("sync", SYNC + "[replica]\nfsdp = 2\n"),
    "sync, tensor = 2": _cut("sync", SYNC + "[replica]\ntensor = 2\n"),
    "sync, pipeline = 2": _cut("sync", SYNC + "[replica]\npipeline = 2\n"),
}
SLOW = """
import time

_loss = task.loss


def slow_loss(model, batch):
    time.sleep(0.02)
    return _loss(model, batch)


task.loss = slow_loss
"""
"""Steps sleep, so that the others gain no cores from a paused replica."""
PAUSED_S, BEFORE_S, RATE_ASKED = 10.0, 10.0, 1.1
JOB = """[job]
name = "topology"
task = "train.py:task"
stop = {{ {stop} }}
[algorithm]
{algorithm}
{sections}
{servers}
[workers]
count = {workers}
batch_size = 16
device = "cpu"
threads = 1
"""


def measure(*, quick: bool) -> list[Figure]:
    """quick: the first one only."""
    found = [_measured(name, run) for name, run in list(RUNS.items())[: 1 if quick else None]]
    return found if quick else [*found, _paused()]


def _measured(name: str, run: Run) -> Figure:
    figure = Figure(CHAPTER, f"{name}: digits after a kill", "% wrong", (), asked=WRONG_ASKED)
    with sandbox() as directory:
        try:
            status = _run(_written(directory, run, PLAN, f"epochs = {run.epochs}"), run)
        except (RuntimeError, ProcessLookupError) as error:
            return replace(figure, failed=str(error))
    value = 100 * (1 - status["evaluation"]["accuracy"])
    again = sum(row["incarnation"] - 1 for row in status["daemons"])
    detail = f"{status['samples']:,} samples, {again} started again"
    print(f"  {name}: {value:.3g}, {detail}", file=sys.stderr, flush=True)
    return replace(figure, values=(value,), detail=detail)


def _written(directory: Path, run: Run, more: str, stop: str) -> Path:
    """The job file. `more`: added to the task."""
    for file in ("train.py", "digits.npz"):
        shutil.copy(EXAMPLE / file, directory)
    with (directory / "train.py").open("a") as file:
        file.write(more)
    job = directory / "job.toml"
    job.write_text(
        JOB.format(
            algorithm=run.algorithm, sections=run.sections, workers=run.workers, stop=stop,
            servers=f"[servers]\ncount = {run.servers}" if run.servers else "",
        )
    )  # fmt: skip
    return job


def _paused() -> Figure:
    """How much longer a step of the three others takes while one of four is paused."""
    run = RUNS["gossip"]._replace(workers=4)
    with sandbox() as directory:
        file = _written(directory, run, SLOW, "seconds = 600")
        with Dlctl().running(file):
            before = _rates(file, BEFORE_S)
            paused = _pids(_status(Dlctl(), file))["worker-3"]
            os.kill(paused, signal.SIGSTOP)
            try:
                during = _rates(file, PAUSED_S)
            finally:
                os.kill(paused, signal.SIGCONT)
    others = sorted(before.keys() - {"worker-3"})
    ratios = tuple(before[name] / during[name] for name in others)
    told = ", ".join(f"{name} {before[name]:.1f} / {during[name]:.1f}" for name in others)
    what = "gossip: a step of the others, one paused for 10 s / before"
    return Figure(CHAPTER, what, "x", ratios, RATE_ASKED, f"steps/s before / during: {told}")


def _rates(file: Path, seconds: float) -> dict[str, float]:
    """Worker -> steps per second; waits until all have made steps."""
    dlctl, until = Dlctl(), time.monotonic() + LIMIT_S
    while not all(_steps(dlctl, file).values()):
        if time.monotonic() > until:
            raise RuntimeError(f"a worker has made no step in {LIMIT_S:.0f} s")
        time.sleep(LOOK_S)
    began, first = time.monotonic(), _steps(dlctl, file)
    time.sleep(seconds)
    took_s, last = time.monotonic() - began, _steps(dlctl, file)
    return {name: (last[name] - first[name]) / took_s for name in first}


def _steps(dlctl: Dlctl, file: Path) -> dict[str, int]:
    """Worker -> number of steps."""
    rows = _status(dlctl, file)["daemons"]
    return {row["name"]: row["metrics"].get("step", 0) for row in rows if row["role"] == "worker"}


def _pids(status: dict[str, Any]) -> dict[str, int | None]:
    """Daemon -> pid, None while it does not run."""
    return {row["name"]: row["pid"] for row in status["daemons"]}


def _run(file: Path, run: Run) -> dict[str, Any]:
    """Its final status. Raises RuntimeError if it does not finish, or no process was killed."""
    dlctl, is_killed, until = Dlctl(), False, time.monotonic() + LIMIT_S
    dlctl("start", "--fresh", str(file))
    try:
        while (status := _status(dlctl, file))["state"] not in database.ENDED:
            if time.monotonic() > until:
                raise RuntimeError(f"timeout after {LIMIT_S:.0f} s: {status['reason']}")
            if not is_killed and status["samples"] >= KILL_AFTER:
                os.kill(_victim(status, run), signal.SIGKILL)
                is_killed = True
            time.sleep(LOOK_S)
        if status["state"] != "finished" or not is_killed:
            raise RuntimeError(f"{status['state']}: {status['reason']}; killed: {is_killed}")
        return status
    finally:
        dlctl("stop", "--kill", "-q", "-j", str(file))


def _status(dlctl: Dlctl, file: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(dlctl("status", "--json", "-j", str(file)))
    return status


def _victim(status: dict[str, Any], run: Run) -> int:
    """The pid of the process to kill. Raises RuntimeError if it does not run."""
    pid = _pids(status)[run.kills]
    if pid is None:
        raise RuntimeError(f"{run.kills} has ended before it could be killed")
    if not run.is_rank:
        return pid
    for child in psutil.Process(pid).children():
        if "daemons.worker.later_rank" in child.cmdline():
            return child.pid
    raise RuntimeError(f"{run.kills} has no later process")
