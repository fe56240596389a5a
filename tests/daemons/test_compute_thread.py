"""Whatever user code raises, the computing thread answers and lives on."""

from __future__ import annotations

import io
import logging
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import numpy as np
import pytest

from daemons.loop import Loop
from daemons.worker import compute_thread
from daemons.worker.compute_thread import TEXT_CHARS_MAX, ComputeThread
from daemons.worker.task import print_streams
from daemons.worker.task.failures import ProcessLost
from dlctl.algorithms.base import Shape
from dlctl.errors import DlctlError, Unreachable
from dlctl.job import config
from dlctl.roles.protocol.effects import (
    BringRows,
    BuildModel,
    Compute,
    Computed,
    LoadBuffers,
    ModelBuilt,
    StopCompute,
    TaskFailed,
)
from dlctl.wire.machine import Effect, Event, Exit, Started
from dlctl.wire.messages import Register

BIRTH = Register("run", "worker", "worker-0", 1, 1, "here", "0")
TASK = """
    import asyncio
    import os
    import signal
    import torch
    from torch import nn

    class Odd(BaseException):
        pass

    class Glitching(nn.Module):
        def __init__(self, *factors):
            super().__init__()
            self.factors = iter(factors)

        def forward(self, x):
            return x * next(self.factors)

    def model():
        {model}

    class Random(list):
        def __getitem__(self, index):
            return torch.rand(2)

    class Deadly(list):
        def __getitem__(self, index):
            os.kill(os.getpid(), signal.SIGKILL)

    def dataset():
        return {dataset}

    def loss(model, batch):
        return model(batch).mean()
    """
ONES = "[torch.ones(2)] * 4"


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch) -> Iterator[Callable[..., Loop]]:
    """A loop with a real computing thread for a task with this body of model()."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    threads: list[ComputeThread] = []

    def prepare(
        model: str, dataset: str = ONES, loader_processes: int = 0, accumulate: int = 1
    ) -> Loop:
        path = tmp_path / "odd_task.py"
        path.write_text(dedent(TASK).format(model=model, dataset=dataset))
        job = config.JobFile(
            job=config.Job(name="odd", task=str(path)),
            workers=config.Workers(
                count=1, device="cpu", batch_size=4, loader_processes=loader_processes
            ),
            gradient=config.Gradients(accumulate=accumulate),
        )
        loop = Loop()
        thread = ComputeThread(loop, job, (tmp_path, BIRTH), Shape())
        threading.Thread(target=thread.run, name="compute", daemon=True).start()
        threads.append(thread)
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
        "the compute thread was interrupted by KeyboardInterrupt: "
    ] * 2


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_model_that_begins_with_a_nan_is_refused_by_the_parameter_s_name(build, value):
    body = (
        "m = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)); "
        f"m[1].weight.data[0, 1] = float('{value}'); return m"
    )
    (failed,) = build(body)
    assert isinstance(failed, TaskFailed)
    assert failed.error.startswith('parameter "1.weight" ')
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


def test_a_step_without_memory_says_how_to_make_it_smaller(prepared, run_script):
    body = "m = nn.Linear(2, 1); m.register_forward_pre_hook(lambda *_: bytearray(1 << 60)); "
    script = [BuildModel(0, 1), Compute(0, 0, 4, 0)]
    _, failed = run_script(prepared(f"{body}return m"), *script, awaited=2)
    assert "task.loss raised MemoryError" in failed.error
    assert re.findall(r" = (\d)", failed.error) == ["2", "2"]


def finish(does: Callable[[], None]) -> tuple[str, str]:
    """What is sent of a finish that does this."""

    def ends(*_: object) -> str:
        does()
        return "returned"

    return compute_thread.run_finish(SimpleNamespace(finish=ends), np.zeros(0), np.zeros(0), {})


@contextmanager
def stdout(monkeypatch: pytest.MonkeyPatch, path: Path) -> Iterator[None]:
    """The stdout of a worker, which writes to this file."""
    with path.open("wb") as file, monkeypatch.context() as patch:
        stream = print_streams.Stream(file.fileno(), "<stdout>")
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "__stdout__", stream)
        yield
        stream.end_lines()


def test_only_the_beginning_of_what_finish_prints_is_kept(monkeypatch, tmp_path):
    def does() -> None:
        for _ in range(1000):
            print("x" * 7_000)

    with stdout(monkeypatch, tmp_path / "stdout"):
        text, failed = finish(does)
    assert (len(text), text[-3:], failed) == (TEXT_CHARS_MAX, "...", "")
    assert (tmp_path / "stdout").stat().st_size == 7_001_000, "all of it is printed"


def test_what_is_kept_of_an_output_is_bounded(monkeypatch, tmp_path):
    with stdout(monkeypatch, tmp_path / "stdout"):
        with print_streams.copied(10) as copy:
            for _ in range(1000):
                print("x" * 7)
        print("later")
    assert copy.getvalue() == "xxxxxxx\nxx"


def test_the_output_of_finish_is_kept_whatever_finish_does_with_it(monkeypatch, tmp_path):
    def does() -> None:
        print("printed")
        sys.stdout.close()
        print("more")
        subprocess.run(["echo", "from a child"], stdout=sys.stdout, check=True)
        with redirect_stdout(io.StringIO()):
            print("elsewhere")
        print("no end", end="")

    with stdout(monkeypatch, tmp_path / "stdout"):
        assert finish(does) == ("printed\nmore\nno end\nreturned", "")
    assert (tmp_path / "stdout").read_text() == "printed\nmore\nfrom a child\nno end"


VARIANCE_INFINITE = "torch.tensor([[1e25], [0.0], [0.0], [0.0]])"
"""A batch whose loss and gradient are finite, and whose variance is not in float32."""


@pytest.mark.parametrize("glitch", ["float('nan')", VARIANCE_INFINITE])
def test_one_poisoned_batch_does_not_end_the_statistics(prepared, run_script, caplog, glitch):
    """BatchNorm's running mean: 9 / 10 of what it was, and 1 / 10 of the batch's."""
    body = f"return nn.Sequential(Glitching(1.0, {glitch}, 2.0), nn.BatchNorm1d(2))"
    steps = [Compute(0, 0, 4, 0)] * 3
    with caplog.at_level(logging.WARNING):
        events = run_script(prepared(body), BuildModel(0, 1), *steps, awaited=4)
    first, glitched, last = [event for event in events if isinstance(event, Computed)]
    assert first.averaged[:2].tolist() == pytest.approx([0.1, 0.1])
    assert np.isfinite(glitched.averaged).all()
    assert np.isfinite(last.averaged).all()
    assert last.averaged.tolist() == pytest.approx([0.29, 0.29, 0.81, 0.81, 2.0])
    assert len(caplog.records) == (glitch == VARIANCE_INFINITE), "the role tells of a NaN"


def test_after_a_poisoned_batch_the_loaded_statistics_are_there_again(prepared, run_script):
    body = "return nn.Sequential(Glitching(float('nan')), nn.BatchNorm1d(2))"
    loaded = np.array([3.0, 4.0, 5.0, 6.0, 7.0])
    script = [BuildModel(0, 1), LoadBuffers(loaded), Compute(0, 0, 4, 0)]
    _, _, computed = run_script(prepared(body), *script, awaited=3)
    assert not np.isfinite(computed.loss)
    assert computed.averaged.tolist() == loaded.tolist()


@pytest.mark.parametrize("dataset", ["[torch.ones(2)] * 8", "Random(range(8))"])
def test_a_gradient_is_stopped_before_its_second_batch_and_computed_as_if_it_had_not_been(
    prepared, run_script, dataset: str
) -> None:
    body = "return nn.Sequential(Glitching(*range(1, 9)), nn.BatchNorm1d(2))"
    place = (0, 0, 8, 0)
    script = [
        BuildModel(0, 1),
        StopCompute(1),
        Compute(*place, ticket=1),
        Compute(*place, ticket=2),
    ]
    _, stopped, computed = run_script(prepared(body, dataset, accumulate=2), *script, awaited=3)
    assert stopped.is_stopped
    assert not stopped.is_usable
    assert stopped.averaged.tolist() == [0.0, 0.0, 1.0, 1.0, 0.0], "as before the first batch"
    assert computed.is_usable, "a stop is of one computation"
    assert computed.averaged[-1] == 2.0, "both batches, once"
    if dataset.startswith("["):  # The first batch was multiplied by 1, these by 2 and 3.
        mean = 0.9 * 0.1 * 2 + 0.1 * 3
        assert computed.averaged[:2].tolist() == pytest.approx([mean, mean])


def test_the_data_of_a_stopped_gradient_is_not_loaded_again(prepared, run_script) -> None:
    """A dataset that draws would give other samples."""
    seen = "seen = []; m = nn.Linear(2, 1); m.register_forward_pre_hook("
    body = f"{seen}lambda _, x: print(x[0].sum().item(), flush=True)); return m"
    loop = prepared(body, "Random(range(8))", accumulate=2)
    script = [BuildModel(0, 1), StopCompute(1)]
    script += [Compute(0, 0, 8, 0, ticket=ticket) for ticket in (1, 2)]
    with redirect_stdout(io.StringIO()) as printed:
        run_script(loop, *script, awaited=3)
    first, again, _ = printed.getvalue().split()
    assert first == again


# torch starts its loaders with fork where Python does; newer Pythons remark that threads are about.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("loader_processes", [0, 1])
def test_a_dataset_that_draws_gives_each_term_of_a_slot_something_else(
    prepared, run_script, loader_processes
):
    def loss(slot: int, term: int) -> float:
        loop = prepared("return nn.Linear(2, 1)", "Random(range(4))", loader_processes)
        effects = BuildModel(slot, term), Compute(0, 0, 4, 0)
        _, computed = run_script(loop, *effects, awaited=2)
        assert isinstance(computed, Computed)
        return computed.loss

    losses = [loss(0, 1), loss(1, 1), loss(0, 2)]
    assert len(set(losses)) == 3
    assert loss(1, 1) == losses[1]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_that_loads_data_and_is_killed_ends_the_worker_and_not_the_run(
    prepared, run_script
):
    """Its exit code is that of one that was killed, too: another one takes its place."""
    loop = prepared("return nn.Linear(2, 1)", "Deadly(range(4))", 1)
    of_torch = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Other tests have loaders in here.
    try:
        with pytest.raises(ProcessLost, match="SIGKILL") as caught:
            run_script(loop, BuildModel(0, 1), Compute(0, 0, 4, 0), awaited=3)
    finally:
        signal.signal(signal.SIGCHLD, of_torch)
    assert caught.value.exit_code == Unreachable.exit_code


def test_rows_that_do_not_come_are_waited_for_so_long_and_no_longer(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(compute_thread, "EVALUATE_S_MAX", 0.01)
    loop = Loop()
    job = config.JobFile(job=config.Job(name="rows", task="train.py:"))
    thread = ComputeThread(loop, job, (tmp_path, BIRTH), Shape())
    with pytest.raises(DlctlError, match="rows"):
        thread._fetch_rows(np.arange(3))
    late, own = BringRows(np.zeros(3, np.float32)), BringRows(np.ones(3, np.float32))
    perform = loop._performers[BringRows]
    perform(late)
    monkeypatch.setattr(loop, "post", lambda event: perform(own))
    assert thread._fetch_rows(np.arange(3)) is own.values, "the late answer is of another request"
    loop.transport.close()
