"""One model for several processes: who makes the memory, who finds it, and what becomes of
additions that nobody locks.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from daemons.worker.hogwild import workers
from daemons.worker.hogwild.workers import FILE, MEMORY, Shared, share
from daemons.worker.inner_optimizer import InnerOptimizer
from daemons.worker.replica import TorchReplica
from daemons.worker.stepper import Stepper
from daemons.worker.task.user_task import Task
from dlctl.errors import DlctlError
from dlctl.job.config import Choice, Gradients

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
FORKS = multiprocessing.get_context("fork")
ROWS = 64
TAKEN_S = 20.0
OPEN: list[int] = []
"""Memory of this test, which a worker would have until its end."""


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPEN:
        os.close(OPEN.pop())


class Bags:
    """A sum of rows: the gradient of each row is how often it is in the batch. Beside it lies a
    dense parameter.
    """

    def model(self) -> nn.Module:
        bag = nn.EmbeddingBag(ROWS, 1, mode="sum", sparse=True)
        nn.init.zeros_(bag.weight)
        return nn.ModuleDict({"bag": bag, "bias": nn.Linear(1, 1)})

    def dataset(self) -> list[int]:
        return [0]

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        return -model["bag"](batch).sum() + 0.0 * model["bias"].weight.sum()

    def evaluate(self, model: Any) -> dict[str, float]:
        return {"sum": float(model["bag"].weight.sum())}


class Quadratic(Bags):
    """With a gradient that depends on where the model is."""

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        return ((model["bag"](batch) - 1.0) ** 2).mean()


class Larger(Bags):
    def model(self) -> nn.Module:
        return nn.EmbeddingBag(ROWS + 1, 1, sparse=True)


def replica_of(task: Any) -> TorchReplica:
    return TorchReplica(Task(task), device="cpu", seed=3)


def shared(task: Any, directory: Path, lr: float = 1.0, **gradients: Any) -> tuple[Stepper, Shared]:
    """A worker's model and optimiser, in the memory of this directory."""
    replica = replica_of(task)
    optimizer = InnerOptimizer(Choice(name="sgd", options={"lr": lr}), replica.values)
    stepper = Stepper(replica, Gradients(**gradients), optimizer)
    found = share(replica, directory)
    OPEN.append(found.descriptor)
    return stepper, found


def bags(numbers: np.random.Generator, count: int, rows: int = 4) -> list[Tensor]:
    return [torch.from_numpy(numbers.integers(0, ROWS, (2, rows))) for _ in range(count)]


def step(stepper: Stepper, batch: Tensor, lr: float = 1.0) -> None:
    assert stepper.step([(batch, 1.0)], own_lr=lr, gather=False).is_usable


# ---------------------------------------------------------------- who makes it, who finds it


def test_the_first_one_makes_it_and_all_others_step_in_the_same_values(tmp_path):
    first, made = shared(Bags(), tmp_path)
    second, found = shared(Bags(), tmp_path)
    assert (made.is_new, found.is_new) == (True, False)
    made.mark[0] = 1
    assert found.mark[0] == 1
    step(first, torch.tensor([[0, 1]]))
    step(second, torch.tensor([[1, 1]]))
    for stepper in (first, second):
        assert stepper.replica.parameters[:3].tolist() == [1, 3, 0]


def test_who_joins_later_takes_what_is_there_and_not_what_it_has_built(tmp_path):
    first, _ = shared(Bags(), tmp_path)
    first.replica.parameters[:] = 7.0
    later, _ = shared(Bags(), tmp_path)
    assert (later.replica.parameters == 7.0).all()
    assert all((value == 7.0).all() for value in later.replica.values)


def test_another_model_is_refused_and_the_others_go_on(tmp_path):
    first, _ = shared(Bags(), tmp_path)
    with pytest.raises(DlctlError, match=rf"\b{ROWS + 2} .*\b{ROWS + 1}\b"):
        share(replica_of(Larger()), tmp_path)
    _, found = shared(Bags(), tmp_path)
    assert not found.is_new
    assert first.replica.parameters.size == ROWS + 2


@pytest.mark.parametrize("text", ["", "[", "[1, 2]", '[1, "zz", []]', '[1, "00", [["a", 1]]]'])
def test_a_file_that_tells_of_nobody_is_as_good_as_none(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert shared(Bags(), tmp_path)[1].is_new


def test_memory_behind_the_number_of_another_process_is_not_taken_for_it(tmp_path, monkeypatch):
    """Its secret is another one: the number has been used again."""
    monkeypatch.setattr(workers.secrets, "token_bytes", lambda count: b"x" * count)
    shared(Bags(), tmp_path)
    file = tmp_path / FILE
    file.write_text(file.read_text().replace(b"x".hex(), b"y".hex()))
    assert shared(Bags(), tmp_path)[1].is_new


def test_a_copy_of_a_run_does_not_step_in_the_model_of_the_run(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    shared(Bags(), first)
    shutil.copytree(first, second)
    assert shared(Bags(), second)[1].is_new
    assert not shared(Bags(), first)[1].is_new


def who_has(memory: int) -> set[int]:
    """The processes that have it open; memory: its inode."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if MEMORY in str(path.readlink()) and path.stat().st_ino == memory:
                found.add(int(path.parts[2]))
    return found


def forked(does: Callable[[Any], None]) -> tuple[Any, Any]:
    """A process that does this with its end of a pipe, and ours."""
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=does, args=(theirs,), daemon=True)
    process.start()
    return process, ours


def test_it_outlives_who_made_it_and_is_gone_with_the_last_one(tmp_path):
    def live(link: Any) -> None:
        stepper, found = shared(Bags(), tmp_path)
        step(stepper, torch.tensor([[5, 5]]))
        inode = os.fstat(found.descriptor).st_ino
        link.send((found.is_new, float(stepper.replica.parameters[5]), inode))
        signal.pause()

    def killed(process: Any) -> None:
        process.kill()
        process.join(TAKEN_S)

    first, link = forked(live)
    is_new, value, memory = link.recv()
    assert (is_new, value) == (True, 2.0)
    second, link = forked(live)
    assert link.recv() == (False, 4.0, memory)
    killed(first)
    third, link = forked(live)
    assert link.recv() == (False, 6.0, memory)
    assert who_has(memory) == {second.pid, third.pid}
    killed(second)
    killed(third)
    assert who_has(memory) == set()
    fourth, link = forked(live)
    is_new, value, _ = link.recv()
    assert (is_new, value) == (True, 2.0)
    killed(fourth)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_who_is_killed_at_any_line_leaves_the_memory_to_be_found(tmp_path):
    """Else the next one would make a second model, and nobody would notice."""
    file = workers.__file__

    def die(line: int) -> Callable[[Any], None]:
        def does(link: Any) -> None:
            left = line

            def trace(frame: Any, event: str, argument: Any) -> Any:
                nonlocal left
                if frame.f_code.co_filename != file or frame.f_code.co_name == "<listcomp>":
                    return None  # Those have as many lines as there are workers.
                left -= event == "line"
                if not left:
                    link.send("dies")
                    os._exit(1)
                return trace

            sys.settrace(trace)
            share(replica, tmp_path)
            sys.settrace(None)
            link.send("lives")
            os._exit(0)

        return does

    replica = replica_of(Bags())
    shared(Bags(), tmp_path)
    line, said = 0, "dies"
    while said == "dies":
        line += 1
        process, link = forked(die(line))
        said = link.recv()
        process.join(TAKEN_S)
        assert not shared(Bags(), tmp_path)[1].is_new, f"killed at line {line}"
    assert line > 20


# ---------------------------------------------------------------- additions without locks


def test_of_two_processes_few_additions_are_lost_and_each_that_is_can_be_counted(tmp_path):
    """Each adds 1 to the same few rows, hundreds of times; the sum of all rows is what has come.
    Additions of small whole numbers are exact in float32: what is missing was lost.
    """
    steps, rows = 400, torch.arange(8).view(1, 8)

    def add(link: Any) -> None:
        torch.set_num_threads(1)
        stepper, _ = shared(Bags(), tmp_path)
        link.send("ready")
        link.recv()
        for _ in range(steps):
            step(stepper, rows)
        link.send("done")
        signal.pause()

    stepper, _ = shared(Bags(), tmp_path)
    both = [forked(add) for _ in range(2)]
    for word in ("ready", "done"):
        for _, link in both:
            assert link.recv() == word
        for _, link in both:
            link.send("go")
    for process, _ in both:
        process.kill()
        process.join(TAKEN_S)
    values = stepper.replica.parameters[:ROWS]
    added, came = 2 * steps * rows.numel(), float(values.sum())
    assert values[8:].tolist() == [0.0] * (ROWS - 8)
    assert came == int(came), "only whole additions are lost"
    # Alone on two cores a percent or so; more where others interrupt one between read and write.
    assert 0 <= added - came <= 0.2 * added
    assert (values[:8] >= steps).all(), "of one process alone nothing is lost"


def test_an_addition_between_another_ones_load_and_store_is_missing(tmp_path):
    """How a loss looks that the test above counts."""
    first, _ = shared(Bags(), tmp_path)
    second, _ = shared(Bags(), tmp_path)
    loaded = first.replica.parameters[3]
    step(second, torch.tensor([[3]]))
    first.replica.parameters[3] = loaded + 1
    assert second.replica.parameters[3] == 1, "two were added"


def test_a_sparse_gradient_writes_its_rows_alone(tmp_path):
    """Also when it is clipped: another process's writes to other rows must not be undone."""
    stepper, _ = shared(Bags(), tmp_path, clip_norm=0.5)
    weight = stepper.replica.values[0]
    before = weight.clone()
    step(stepper, torch.tensor([[9, 9, 2]]))
    changed = (weight != before).nonzero()[:, 0].tolist()
    assert changed == [2, 9]
    assert float(weight.norm()) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.oracle("hogwild", "torch.optim.SGD, step by step")
def test_workers_that_step_in_turns_are_one_loop_of_torch(tmp_path, agree):
    steppers = [shared(Quadratic(), tmp_path, lr=0.1)[0] for _ in range(3)]
    batches = bags(np.random.default_rng(0), 60)
    for number, batch in enumerate(batches):
        step(steppers[number % 3], batch, lr=0.1)
    torch.manual_seed(3)
    model = Quadratic().model()
    script = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        script.zero_grad()
        Quadratic().loss(model, batch).backward()
        script.step()
    whole = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()
    agree(steppers[0].replica.parameters, whole)


# ---------------------------------------------------------------- what others must not see


def test_an_evaluation_neither_shows_nor_undoes_anything(tmp_path):
    """Another worker steps meanwhile: it sees none of what is evaluated, and loses nothing."""
    first, _ = shared(Bags(), tmp_path)
    second, _ = shared(Bags(), tmp_path)
    step(first, torch.tensor([[1]]))
    evaluated = np.full(ROWS + 2, 2.0, np.float32)

    class Busy(Bags):
        def evaluate(self, model: Any) -> dict[str, float]:
            assert float(second.replica.parameters[:ROWS].sum()) == 1.0
            with torch.enable_grad():
                step(second, torch.tensor([[1]]))
            return super().evaluate(model)

    first.replica.task = Task(Busy())
    found = first.replica.evaluate(evaluated, np.zeros(0))
    assert found == {"sum": 2.0 * ROWS}
    step(first, torch.tensor([[2]]))
    assert second.replica.parameters[:4].tolist() == [0, 2, 1, 0]


def test_that_others_step_is_not_taken_for_what_the_task_does(tmp_path):
    """A parameter without a gradient that changes in a step is an error in a model of one's own."""

    class Beside(Bags):
        def loss(self, model: Any, batch: Tensor) -> Tensor:
            step(second, torch.tensor([[7]]))
            return model["bias"].weight.sum()

    second, _ = shared(Bags(), tmp_path)
    first, _ = shared(Beside(), tmp_path)
    for _ in range(4):
        step(first, torch.tensor([[0]]))
    assert first.replica.parameters[7] == 4
