"""Whatever user code raises, the computing thread answers and lives on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from daemons.loop import Loop
from daemons.worker.compute import ComputeThread
from dlctl import config
from dlctl.machine import Effect, Event, Exit, Started
from dlctl.roles.effects import BuildModel, Compute, Computed, ModelBuilt, TaskFailed

TASK = """
    import asyncio
    import torch
    from torch import nn

    class Odd(BaseException):
        pass

    def model():
        {model}

    class Random(list):
        def __getitem__(self, index):
            return torch.rand(2)

    def dataset():
        return Random(range(4))

    def loss(model, batch):
        return model(batch).mean()
    """


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch) -> Iterator[Callable[..., Loop]]:
    """A loop with a real computing thread for a task with this body of model()."""
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    threads: list[ComputeThread] = []

    def prepare(model: str, loader_processes: int = 0) -> Loop:
        path = tmp_path / "odd_task.py"
        path.write_text(dedent(TASK).format(model=model))
        job = config.JobFile(
            job=config.Job(name="odd", task=str(path)),
            workers=config.Workers(count=1, device="cpu", loader_processes=loader_processes),
        )
        loop = Loop()
        thread = ComputeThread(loop, job)
        threads.append(thread)
        loop.perform(BuildModel, thread.build)
        loop.perform(Compute, thread.compute)
        return loop

    yield prepare
    for thread in threads:
        if thread._loader is not None:
            thread._loader.close()


@pytest.fixture
def build(prepared: Callable[..., Loop], run_script: Callable[..., list[Event]]) -> Callable:
    """The answer of the thread to `BuildModel`, with this body of model()."""

    def build_model(model: str, times: int = 1) -> list[Event]:
        return run_script(prepared(model), *[BuildModel(0, 1)] * times, awaited=times)

    return build_model


@pytest.mark.parametrize(
    "error", ["asyncio.CancelledError()", "GeneratorExit()", "SystemExit(3)", "Odd('very')"]
)
def test_an_error_that_is_no_exception_is_the_task_s_and_the_thread_lives_on(build, error):
    events = build(f"raise {error}", times=2)
    assert all(isinstance(event, TaskFailed) for event in events)
    name = error.partition("(")[0].rpartition(".")[2]
    assert all(event.error.startswith(f"task.model raised {name}: ") for event in events)
    assert "odd_task.py" in events[0].detail


def test_even_a_keyboard_interrupt_in_the_thread_is_answered(build):
    events = build("raise KeyboardInterrupt", times=2)
    assert [event.error for event in events] == [
        "something ended the computing with KeyboardInterrupt: "
    ] * 2


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_model_that_begins_with_a_nan_is_refused_by_the_parameter_s_name(build, value):
    body = (
        "m = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)); "
        f"m[1].weight.data[0, 1] = float('{value}'); return m"
    )
    (failed,) = build(body)
    assert isinstance(failed, TaskFailed)
    assert failed.error.startswith('parameter "1.weight" of the new model has 1 of 3 values')
    assert "odd_task.py:" in failed.error


class Squares:
    """A machine that reckons with what has no square in float32 when the model is built."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, Started):
            return [BuildModel(0, 1)]
        assert isinstance(event, ModelBuilt)
        assert np.array([1e-30], np.float32) ** 2 == 0
        return [Exit(0, threading.current_thread().name)]

    def deadline(self) -> float | None:
        return None


def test_what_numpy_shall_raise_in_the_task_it_does_not_raise_in_the_role(
    prepared, caplog, monkeypatch
):
    """The role is told of the result in the task's own thread, as the loop only waits."""
    loop = prepared("import numpy; numpy.seterr(all='raise'); return nn.Linear(2, 1)")
    waits, wait, offer = threading.Event(), loop._wait, loop.offer
    monkeypatch.setattr(loop, "_wait", lambda deadline: waits.set() or wait(deadline))
    monkeypatch.setattr(loop, "offer", lambda *result: waits.wait() and offer(*result))
    with caplog.at_level(logging.INFO):
        assert loop.run(Squares()) == 0
    assert "exit 0: compute" in caplog.text


def test_a_good_model_is_built(build):
    (built,) = build("return nn.Linear(2, 1)")
    assert isinstance(built, ModelBuilt)


# torch starts its loaders with fork where Python does; newer Pythons remark that threads are about.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("loader_processes", [0, 1])
def test_a_dataset_that_draws_gives_each_epoch_of_a_slot_something_else(
    prepared, run_script, loader_processes
):
    def loss(slot: int, epoch: int) -> float:
        loop = prepared("return nn.Linear(2, 1)", loader_processes)
        effects = BuildModel(slot, epoch), Compute(0, 0, 4, 0)
        _, computed = run_script(loop, *effects, awaited=2)
        assert isinstance(computed, Computed)
        return computed.loss

    losses = [loss(0, 1), loss(1, 1), loss(0, 2)]
    assert len(set(losses)) == 3
    assert loss(1, 1) == losses[1]
