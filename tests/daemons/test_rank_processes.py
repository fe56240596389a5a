"""Replicas of several processes: real ones, with this process as rank 0."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import psutil
import pytest
import torch.distributed as dist
from dlctl_toys.engine import Twin

from daemons.worker.building import build_replica, make_engine
from daemons.worker.ranks.rank_group import BUILT
from daemons.worker.ranks.rank_processes import Ranks, RanksEnded
from daemons.worker.task.failures import ProcessLost
from dlctl.algorithms.engines import Operations, TwinPlace
from dlctl.job import config
from dlctl.roles.protocol.effects import TaskFailed

pytestmark = pytest.mark.usefixtures("forked")

TASK = """
    import os, sys, threading
    import torch

    IS_LATER = "daemons.worker.later_rank" in " ".join(sys.orig_argv)

    def model():
        {model}
        return torch.nn.Linear(3, 2)

    def dataset():
        return [torch.ones(3)]

    def loss(model, batch):
        return model(batch).mean()
    """
TOYS = Path(__file__).parents[1] / "toys"
COMES_S = 60.0


class House:
    """Rank 0, and what it was told."""

    def __init__(self, path: Path, model: str, count: int, ready_s: float, silent_s: float) -> None:
        (path / "train.py").write_text(dedent(TASK).format(model=model))
        self.job = config.JobFile(
            job=config.Job(name="ranks", task=str(path / "train.py:")),
            algorithm=config.Choice(name="toy-engine"),
            workers=config.Workers(count=1, device="cpu", threads=2, processes=count),
        )
        (path / "job.json").write_text(json.dumps(config.to_dict(self.job)))
        self.events: list[Any] = []
        self._is_told = threading.Event()
        self.ranks = Ranks(
            count, self._tell, self._tell, argv=(str(path), "worker-0", "1"),
            ready_s=ready_s, silent_s=silent_s,
        )  # fmt: skip

    def begin(self) -> House:
        self.ranks.start(slot=0, term=1)
        return self

    def pid(self, rank: int = 1) -> int:
        return self.ranks._ranks[rank - 1].process.pid

    def meet(self) -> Operations:
        """The engine of rank 0, when all have one."""
        replica = build_replica(self.job, 0)
        assert len(replica.parameters) == 8
        target = "dlctl_toys.curvature:Curvature"
        group = self.ranks.meet()
        return make_engine(self.job, target, replica, 0, self.ranks.count, group)

    def until_told(self) -> Any:
        assert self._is_told.wait(COMES_S)
        return self.events[0]

    def _tell(self, event: Any) -> None:
        self.events.append(event)
        self._is_told.set()

    def until_built(self) -> None:
        self.ranks._await(BUILT, "to build its model", time.monotonic() + COMES_S)


@pytest.fixture
def house(tmp_path: Path, monkeypatch) -> Iterator[Callable[..., House]]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(TOYS), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[House] = []

    def make(
        model: str = "pass", count: int = 2, ready_s: float = COMES_S, silent_s: float = COMES_S
    ) -> House:
        made.append(House(tmp_path, model, count, ready_s, silent_s))
        return made[-1]

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # A group looks for its store when it goes: it has to be there.
    for each in made:
        pids = [each.pid(rank) for rank in range(1, len(each.ranks._ranks) + 1)]
        each.ranks.end()
        assert not any(map(psutil.pid_exists, pids))


def test_all_ranks_make_every_operation_and_one_that_fails_is_named(house) -> None:
    at = house(count=3).begin()
    engine, twin = at.meet(), Twin(TwinPlace(None, np.zeros(8, np.float32), None))
    state = {"v": np.arange(8, dtype=np.float32), "steps": np.full(8, 5, np.float32)}
    with at.ranks.same("restore", [*state.values()], names=[*state]):
        engine.restore(state)
    twin.restore(state)
    gradient = np.linspace(-1, 1, 8, dtype=np.float32)
    for _ in range(3):
        with at.ranks.same("run", (gradient,), op="way"):
            (way,) = engine.run("way", (gradient,))
        np.testing.assert_allclose(way, twin.way(gradient)[0], rtol=1e-5)
    with at.ranks.same("state"):
        taken = engine.state()
    np.testing.assert_allclose(taken["v"], twin.state()["v"], rtol=1e-5)
    assert taken["steps"].tolist() == [8, 8, 8, 0, 0, 0, 0, 0]
    assert not at.events
    with pytest.raises(RanksEnded), at.ranks.same("run", op="nothing"):
        failed = at.until_told()
    assert isinstance(failed, TaskFailed)
    assert failed.error.startswith("rank ")
    assert '"nothing"' in failed.error


@pytest.mark.long
def test_rank_0_that_waits_for_a_rank_hears_of_its_death(house) -> None:
    at = house().begin()
    engine = at.meet()
    gradient = np.ones(8, np.float32)
    os.kill(at.pid(), signal.SIGKILL)
    # Its part of the collective fails, too, and that is not the engine's fault.
    with pytest.raises(RanksEnded), at.ranks.same("run", (gradient,), op="way"):
        engine.run("way", (gradient,))
    assert f"(pid {at.pid()})" in at.events[0].message
    assert "SIGKILL" in at.events[0].message
    assert at.events[0].exit_code == 5


@pytest.mark.long
def test_a_rank_that_ends_by_itself_is_told_of_with_its_last_lines(house) -> None:
    at = house("IS_LATER and (print('no disk', flush=True), os._exit(3))").begin()
    with pytest.raises(RanksEnded):
        at.until_built()
    (lost,) = at.events
    assert isinstance(lost, ProcessLost)
    assert f"(pid {at.pid()})" in lost.message
    assert "code 3" in lost.message
    assert lost.detail == "no disk"
    assert lost.exit_code == 1


@pytest.mark.long
def test_what_a_rank_raises_is_the_task_s_error(house) -> None:
    at = house("assert not IS_LATER, 'not here'").begin()
    failed = at.until_told()
    assert failed.error.startswith("rank 1: task.model ")
    assert "train.py" in failed.detail


def test_a_rank_that_takes_too_long_is_named(house) -> None:
    at = house("IS_LATER and threading.Event().wait()", ready_s=0.1).begin()
    with pytest.raises(RanksEnded):
        at.ranks.meet()
    assert at.events[0].message.startswith("rank 1 ")


@pytest.mark.long
def test_a_rank_that_is_stopped_is_noticed(house) -> None:
    at = house(silent_s=1.5).begin()
    at.until_built()
    os.kill(at.pid(), signal.SIGSTOP)
    assert at.until_told().message.startswith("rank ")


def test_who_hears_of_a_loss_knows_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for the ranks goes on as soon as it is notified."""
    events: list[Any] = []
    ranks = Ranks(2, events.append, events.append, argv=(), ready_s=1.0, silent_s=1.0)
    known: list[Exception] = []
    monkeypatch.setattr(ranks._changed, "notify_all", lambda: known.append(ranks.error))
    first, second = ProcessLost("rank 1 was killed"), ProcessLost("rank 2 was killed")
    ranks.lost(first)
    ranks.lost(second)
    assert known == [first, first]
    assert events == [first]
