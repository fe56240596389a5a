"""The computing thread with a method's engine: what comes of operations, errors and its state."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from daemons.loop import Loop
from daemons.worker.compute_thread import ComputeThread
from dlctl.algorithms.base import Shape
from dlctl.job import config
from dlctl.roles.protocol.effects import (
    BuildModel,
    Compute,
    ComputeStateTaken,
    EngineRan,
    ModelBuilt,
    RestoreComputeState,
    RunEngine,
    TakeComputeState,
    TaskFailed,
)
from dlctl.wire.machine import Event
from dlctl.wire.messages import Register

BIRTH = Register("run", "worker", "worker-0", 1, 1, "here", "0")
TASK = """
    import torch

    def model():
        return torch.nn.Linear(2, 1)

    def dataset():
        return [torch.ones(2)] * 4 + [torch.full((2,), 3.0)] * 4

    def loss(model, batch):
        return model(batch).mean() / (batch[0, 0] != 3)
    """
ENGINE = """
    import numpy as np
    from dlctl.algorithms.engines import MethodEngine

    class Counting(MethodEngine):
        def __init__(self, place):
            assert place[2:] == (0, 1, None)
            assert place.options.push_every_steps == 1
            self.size = len(place.replica.parameters)
            self.seen = []
            self.total = np.zeros(1, np.float32)

        def operations(self):
            return {
                "add": self.add, "divide": self.divide, "single": self.single, "told": self.told,
            }

        def begin_step(self, samples, scale):
            self.seen += [samples, scale]

        def see_batch(self, batch, part):
            self.seen += [len(batch), part]

        def discard_step(self):
            self.seen += [-1]

        def told(self):
            return (np.array(self.seen, np.float64),)

        def add(self, *numbers):
            self.total += sum(numbers)
            return (self.total,)

        def divide(self, by):
            raise ZeroDivisionError("no way")

        def single(self):
            return self.total

        def _hidden(self):
            return ()

        def state(self):
            return {"total": self.total}

        def restore(self, state):
            self.total = state["total"] * 1

    class Poor(MethodEngine):
        def __init__(self, place):
            pass

    class Broken:
        def __init__(self, replica, rank, ranks, group):
            pass

    class Foreign:
        def __init__(self, place):
            pass
    """
TWO = np.full(1, 2, np.float32)


@pytest.fixture
def does(tmp_path: Path, monkeypatch, run_script) -> Callable[..., list[Event]]:
    """What comes of these effects, when the model is built: `does(RunEngine("add", (TWO,)))`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "counted.py").write_text(dedent(TASK))
    (tmp_path / "counting.py").write_text(dedent(ENGINE))
    monkeypatch.delitem(sys.modules, "counting", raising=False)

    def run(*effects: object, engine: str = "Counting", awaited: int = 1) -> list[Event]:
        job = config.JobFile(
            job=config.Job(name="odd", task=str(tmp_path / "counted.py")),
            algorithm=config.Choice(name="downpour"),
            workers=config.Workers(count=1, device="cpu", batch_size=2),
            gradient=config.Gradients(accumulate=2),
            data=config.Data(shuffle=False),
        )
        loop = Loop()
        thread = ComputeThread(
            loop, job, (tmp_path, BIRTH), Shape(engine=f"counting:{engine}", twin="none")
        )
        threading.Thread(target=thread.run, name="compute", daemon=True).start()
        events: list[Event] = run_script(loop, BuildModel(0, 1), *effects, awaited=1 + awaited)
        return events[1:] if isinstance(events[0], ModelBuilt) else events

    return run


def test_operations_give_arrays_and_states_are_of_between_two_of_them(does) -> None:
    first, state, second = does(
        RestoreComputeState({"engine.total": TWO}),
        RunEngine("add", (TWO, TWO), ((1,),)),
        TakeComputeState(),
        RunEngine("add", (TWO,)),
        awaited=3,
    )
    assert isinstance(first, EngineRan)
    assert isinstance(state, ComputeStateTaken)
    assert state.arrays["engine.total"].tolist() == [6]
    assert second.arrays[0].tolist() == [8]


@pytest.mark.parametrize(
    ("effect", "error"),
    [
        (
            RunEngine("divide", (TWO,)),
            'downpour: operation "divide" of its engine raised ZeroDivisionError: no way',
        ),
        (
            RunEngine("subtract", ()),
            'downpour: its engine has no operation "subtract"; it has add, divide, single, told',
        ),
        (RunEngine("_hidden", ()), 'downpour: its engine has no operation "_hidden"'),
        (RunEngine("state", ()), 'downpour: its engine has no operation "state"'),
        (
            RunEngine("add", (), ((2,), ())),
            'downpour: operation "add" of its engine returned arrays of shapes [1], not [2], []',
        ),
        (
            RunEngine("single", ()),
            'downpour: operation "single" of its engine returned a value of type ndarray, '
            "not a tuple",
        ),
        (
            RestoreComputeState({"engine.all": TWO}),
            "downpour: restore() of its engine raised KeyError: 'total'",
        ),
    ],
)
def test_what_goes_wrong_is_one_error_that_names_method_and_operation(does, effect, error) -> None:
    (failed,) = does(effect)
    assert isinstance(failed, TaskFailed)
    assert failed.error.startswith(error)
    if " raised " in error:
        assert "counting.py" in failed.error
        assert "counting.py" in failed.detail


def test_an_engine_that_cannot_be_made_is_an_error_of_its_method(does) -> None:
    (failed,) = does(engine="Broken", awaited=0)
    assert failed.error.startswith("downpour: making its engine counting:Broken")
    (failed,) = does(engine="Missing", awaited=0)
    assert failed.error.startswith(
        "downpour: making its engine counting:Missing raised AttributeError"
    )


def test_an_engine_needs_no_state(does) -> None:
    (taken,) = does(RestoreComputeState({"engine.total": TWO}), TakeComputeState(), engine="Poor")
    assert taken == ComputeStateTaken({})


def test_an_engine_is_told_of_each_step_of_its_batches_and_of_those_discarded(does) -> None:
    """Of two batches in a step, and of a loss that is not finite."""
    _, bad, told = does(
        Compute(0, 0, 4, 0, norm_max=1e9),
        Compute(0, 4, 8, 0, norm_max=1e9),
        RunEngine("told", ()),
        awaited=3,
    )
    assert not bad.is_usable
    step = [4, 1, 2, 0.5, 2, 0.5]
    assert told.arrays[0].tolist() == [*step, *step, -1]


def test_what_is_no_engine_is_named(does) -> None:
    (failed,) = does(engine="Foreign", awaited=0)
    assert failed.error.startswith("downpour: its engine is of type Foreign")
