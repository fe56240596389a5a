"""No result of torch depends on which of its threads was the first to call a function."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from daemons.worker.building import build
from daemons.worker.mkl_first_calls import THROUGH_MKL
from dlctl.job import config

TASK = """
    import torch

    torch.sqrt(torch.ones(4096))

    def model():
        return torch.nn.Linear(3, 1)

    def dataset():
        return [torch.ones(3)]

    def loss(model, batch):
        return model(batch).mean()
    """
STORM = """
    # Each child has a copy of an MKL that was never called.
    import os, sys
    import numpy as np, torch
    from daemons.worker.mkl_first_calls import make_first_calls

    x = torch.from_numpy(np.random.default_rng(0).random(60_000, dtype=np.float32) * 0.8 + 0.1)

    def child(function):
        torch.set_num_threads(16)
        make_first_calls()
        os._exit(0 if torch.equal(function(x), function(x)) else 1)

    for name in ("sqrt", "exp", "log", "tanh", "sin", "erf") * 2_000:
        pid = os.fork()
        if pid == 0:
            child(getattr(torch, name))
        if os.waitpid(pid, 0)[1] != 0:
            print(name)
    """


class Calls(TorchFunctionMode):
    """Notes each function that is called with one tensor, that tensor's type and its size."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, torch.dtype, int]] = []

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if len(args) == 1 and isinstance(args[0], torch.Tensor):
            self.made.append((function.__name__, args[0].dtype, args[0].numel()))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[config.JobFile]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "calling_task.py"
    path.write_text(dedent(TASK))
    yield config.JobFile(
        job=config.Job(name="calling", task=str(path)),
        workers=config.Workers(count=1, device="cpu", threads=1, batch_size=1),
    )
    sys.modules.pop("calling_task", None)


def test_each_was_called_by_one_thread_before_any_code_of_the_user(job: config.JobFile) -> None:
    with Calls() as calls:
        build(job, slot=0, processes=0)
    theirs = calls.made.index(("sqrt", torch.float32, 4096))
    for dtype in (torch.float32, torch.float64):
        assert {(name, dtype, 1) for name in THROUGH_MKL} <= set(calls.made[:theirs])


@pytest.mark.long
@pytest.mark.timeout(1300)
def test_the_first_result_of_a_process_is_its_second_one() -> None:
    """Without the first calls it is another one in about one process of 1,500."""
    storm = subprocess.run(
        [sys.executable, "-c", dedent(STORM)], capture_output=True, text=True, timeout=1200
    )
    assert (storm.returncode, storm.stdout) == (0, ""), storm.stderr


def test_what_the_task_draws_while_it_is_imported_is_the_same_in_all_workers(job):
    path = Path(job.job.task)
    drawing = "DRAWN = random.random(), numpy.random.rand(), torch.rand(1)"
    path.write_text(f"import random\nimport numpy\nimport torch\n{drawing}\n{dedent(TASK)}")
    drawn = []
    for slot in (0, 1):
        torch.rand(slot + 1)
        build(job, slot, 0)
        drawn.append(sys.modules.pop("calling_task").DRAWN)
    assert drawn[0] == drawn[1]
