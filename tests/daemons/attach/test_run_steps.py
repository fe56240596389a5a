"""Who makes the steps of a loop that gives its gradients to `run.optimizer`, and what is a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from daemons.attach.alone import Alone
from daemons.attach.exchange import Exchange
from daemons.attach.model_vector import ModelVector
from daemons.attach.run import Run
from daemons.attach.user_optimizer import UserOptimizer
from dlctl.errors import DlctlError
from dlctl.roles.protocol.effects import EvaluationRun, RunEvaluation
from dlctl.roles.protocol.loop_effects import LendModel, LoopStepped
from dlctl.wire.machine import Event

RATE = 0.5


class Lender(Alone):
    """A run that lends the model as told, and keeps what comes back."""

    def __init__(self, model: ModelVector, lent: LendModel) -> None:
        super().__init__(model)
        self.lent, self.came, self.evaluated = lent, list[LoopStepped](), list[Any]()
        self.evaluates = False

    def _lend(self) -> None:
        self.inbox.put(self.lent)

    def offer(self, event: Event) -> None:
        if isinstance(event, LoopStepped):
            self.came.append(event)
            if self.evaluates:
                values = np.zeros_like(self._model.vector)
                self.inbox.put(RunEvaluation(1, values, self._model.averaged(), None))
            else:
                self._lend()
        elif isinstance(event, EvaluationRun):
            self.evaluated.append(event.metrics)
            self._lend()
        else:
            super().offer(event)


def begun(lent: LendModel) -> tuple[Run, Lender, torch.nn.Module, ModelVector]:
    """A run with data of its own that has joined."""
    model = torch.nn.Linear(2, 1)
    vector = ModelVector(model)
    link = Lender(vector, lent)
    run = Run(link, model, vector, Exchange(link, vector, None))
    return run, link, model, vector


def stepped(run: Run, model: torch.nn.Module, optimizer: Any) -> np.ndarray:
    """Make a step; returns its gradient."""
    model(torch.ones(1, 2)).sum().backward()
    gradient = torch.cat([each.grad.flatten() for each in model.parameters()]).numpy().copy()
    optimizer.step()
    optimizer.zero_grad()
    run.step(samples=1)
    return gradient


@pytest.mark.parametrize("gather", [False, True])
def test_the_own_optimizer_steps_where_the_method_wants_steps(gather: bool) -> None:
    """Between the sums of post-local SGD; and along each gradient that Downpour pushes."""
    run, link, model, vector = begun(LendModel(1, steps_own=True, gather=gather))
    own = torch.optim.SGD(model.parameters(), lr=RATE)
    link.own = UserOptimizer(own, vector)
    optimizer = run.optimizer(model)
    run.join()
    before = vector.vector.copy()
    gradient = stepped(run, model, optimizer)
    assert vector.vector == pytest.approx(before - RATE * gradient)
    (came,) = link.came
    assert not came.steps[0].is_skipped
    assert (came.gradient is not None) == gather


def test_a_method_that_steps_replicas_refuses_gradients_alone() -> None:
    run, _, model, _ = begun(LendModel(1, steps_own=True))
    optimizer = run.optimizer(model)
    run.join()
    with pytest.raises(DlctlError) as caught:
        stepped(run, model, optimizer)
    assert "run.optimizer(model, optimizer)" in (caught.value.hint or "")


def test_with_data_of_its_own_each_call_of_micro_is_a_batch() -> None:
    run, _, model, _ = begun(LendModel(1, steps_own=False, gather=True))
    optimizer = run.optimizer(model)
    run.join()
    for _ in range(2):
        assert [run.micro(of=3) for _ in range(3)] == [False, False, True]
        stepped(run, model, optimizer)
    assert run.steps == 2


def test_a_step_behind_a_report_counts() -> None:
    """The model is back when `report` returns, whether the shared weights were used or not."""
    run, link, model, _ = begun(LendModel(1, steps_own=False, gather=True))
    optimizer = run.optimizer(model)
    link.evaluates = True
    assert not run.wants_evaluation
    run.join()
    for number in (1, 2, 3):
        stepped(run, model, optimizer)
        assert run.wants_evaluation
        run.report(number=number)
    assert run.steps == 3
    assert link.evaluated == [{"number": 1.0}, {"number": 2.0}, {"number": 3.0}]
