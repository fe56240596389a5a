"""What a script does with its `Run` that it should not: errors that name the remedy, and nothing
is lost.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from daemons.attach import batch_source
from daemons.attach.alone import Alone
from daemons.attach.exchange import Exchange, Left, Over
from daemons.attach.model_vector import ModelVector
from daemons.attach.run import Run
from daemons.attach.stock import SharedStock
from daemons.attach.user_optimizer import UserOptimizer
from dlctl.errors import DlctlError
from dlctl.job.config import Choice
from dlctl.job.inner import OF_SCRIPT
from dlctl.roles.protocol.effects import EvaluationRun, RunEvaluation
from dlctl.roles.protocol.loop_effects import GiveData, LendModel, LoopLeft, LoopStepped
from dlctl.wire.machine import Event
from dlctl.wire.messages import Lease, ModelReady


class EvaluatingRun(Alone):
    """It lends the model for one step at a time, and asks for an evaluation before each."""

    def __init__(self, model: ModelVector) -> None:
        super().__init__(model)
        self.errors: list[str] = []
        self.skipped: list[bool] = []

    def offer(self, event: Event) -> None:
        if isinstance(event, EvaluationRun):
            self.errors.append(event.error)
            self.inbox.put(LendModel(1))
            return
        if isinstance(event, LoopStepped):
            self.skipped += [step.is_skipped for step in event.steps]
            if event.returns and not event.is_dry:
                values = np.zeros_like(self._model.vector)
                self.inbox.put(RunEvaluation(1, values, self._model.averaged(), None))
                return
        super().offer(event)

    def _lend(self) -> None:
        self.inbox.put(LendModel(1))


def _model() -> tuple[torch.nn.Module, ModelVector, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    return model, ModelVector(model), torch.optim.SGD(model.parameters(), lr=0.1)


def test_no_sample_is_lost_by_an_evaluation_that_the_script_does_not_make() -> None:
    model, vector, optimizer = _model()
    link = EvaluatingRun(vector)
    link.own = UserOptimizer(optimizer, vector)
    run = Run(link, model, vector, Exchange(link, vector, None))
    assert not run.wants_evaluation  # Whoever asks this has to evaluate.
    with run:
        for (x,) in run.loader(TensorDataset(torch.ones(12, 2)), 4):
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
    assert (run.steps, run.samples) == (3, 12)
    assert link.skipped == [False] * 3
    assert len(link.errors) >= 2
    assert all(link.errors)


class EvaluatingAtTheEnd(EvaluatingRun):
    """It asks for an evaluation while the script leaves, and is over when that is answered."""

    def offer(self, event: Event) -> None:
        if isinstance(event, LoopLeft):
            self.inbox.put(RunEvaluation(1, self._model.vector, self._model.averaged(), None))
        elif isinstance(event, EvaluationRun):
            self.errors.append(event.error)
            self.inbox.put(Over("stopped", "it has left"))
        elif isinstance(event, LoopStepped) and event.steps:
            self._lend()


def test_a_script_that_leaves_need_not_evaluate() -> None:
    model, vector, optimizer = _model()
    link = EvaluatingAtTheEnd(vector)
    link.own = UserOptimizer(optimizer, vector)
    run = Run(link, model, vector, Exchange(link, vector, None))
    with run:
        run.join()
        model(torch.ones(1, 2)).mean().backward()
        optimizer.step()
        run.step(samples=1)
    assert run.ended == "stopped"
    assert len(link.errors) == 1


def test_an_optimizer_is_asked_for_where_each_replica_is_stepped() -> None:
    model, vector, optimizer = _model()
    link = Alone(vector)
    link.job = replace(link.job, inner=Choice(name=OF_SCRIPT))
    run = Run(link, model, vector, Exchange(link, vector, None))
    with pytest.raises(DlctlError) as caught:
        run.optimizer(model)
    assert "run.optimizer(model, optimizer)" in (caught.value.hint or "")
    run.optimizer(model, optimizer)
    assert link.own is not None


def test_a_worker_that_has_to_go_is_no_failure_of_its_script() -> None:
    left = Left("it is removed")
    assert isinstance(left, SystemExit)
    assert (left.code, str(left)) == (0, "it is removed")


def _never_steps(samples: int) -> int:
    """Take batches of 4 of so many samples. Returns how many came before an error."""
    model, vector, _ = _model()
    link = Alone(vector)
    run = Run(link, model, vector, Exchange(link, vector, None))
    batches: list[object] = []
    came = map(batches.append, run.loader(TensorDataset(torch.ones(samples, 2)), 4))
    with pytest.raises(DlctlError) as caught:
        deque(came)
    assert f"{len(batches)} batches" in caught.value.message
    assert "run.micro" in (caught.value.hint or "")
    return len(batches)


def test_a_loop_that_never_steps_is_told_so_when_the_data_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_source, "ASK_AGAIN_S", 0.001)
    assert _never_steps(samples=12) == 3


def test_a_loop_gets_only_so_many_batches_for_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_source, "BATCHES_MAX", 5)
    assert _never_steps(samples=100) == 5


class ClientsRun(Alone):
    """Each portion of its data is a client."""

    def __init__(self, model: ModelVector, own: UserOptimizer) -> None:
        super().__init__(model, own)
        self.stock = SharedStock(cuts=True)
        self.clients: list[set[int]] = []

    def join(self, ready: ModelReady) -> None:
        for number, (start, stop) in enumerate([(0, 5), (5, 12)]):
            self.stock.give(GiveData(Lease(1, number, 0, start, stop)))
        super().join(replace(ready, samples=0))

    def offer(self, event: Event) -> None:
        if isinstance(event, LoopStepped):
            self.clients += [{piece.portion for piece in step.pieces} for step in event.steps]
        super().offer(event)


def _clients(*, groups: bool) -> list[set[int]]:
    """The clients of each step."""
    model, vector, optimizer = _model()
    link = ClientsRun(vector, UserOptimizer(optimizer, vector))
    run = Run(link, model, vector, Exchange(link, vector, None))
    with run:
        for number, (x,) in enumerate(run.loader(TensorDataset(torch.ones(12, 2)), 4), 1):
            model(x).mean().backward()
            if not run.micro(of=3) if groups else number % 3:
                continue
            optimizer.step()
            optimizer.zero_grad()
            run.step()
    return link.clients


def test_a_step_ends_where_the_data_of_a_client_does() -> None:
    assert _clients(groups=True) == [{0}, {1}]


def test_a_step_of_two_clients_is_refused() -> None:
    with pytest.raises(DlctlError, match="two clients") as caught:
        _clients(groups=False)
    assert "run.micro" in (caught.value.hint or "")


class EvaluatedRun(Alone):
    """When the data has ended it asks for evaluations of these values; then it is over."""

    def __init__(self, model: ModelVector, own: UserOptimizer, values: list[float]) -> None:
        super().__init__(model, own)
        self.answers: list[EvaluationRun] = []
        self._values = values

    def offer(self, event: Event) -> None:
        match event:
            case EvaluationRun():
                self.answers.append(event)
            case LoopStepped(is_dry=True):
                pass
            case _:
                super().offer(event)
                return
        number = len(self.answers)
        if number == len(self._values):
            self.inbox.put(Over("finished", "all is evaluated"))
            return
        parameters = np.full_like(self._model.vector, self._values[number])
        self.inbox.put(RunEvaluation(number, parameters, self._model.averaged(), None))


@pytest.mark.parametrize(
    ("values", "evaluated"), [([2.0], [2.0]), ([2.0, 3.0], [2.0, 3.0]), ([2.0, 2.0], [2.0])]
)
def test_a_loop_makes_the_evaluations_that_come_when_its_data_has_ended(
    values: list[float], evaluated: list[float]
) -> None:
    model, vector, optimizer = _model()
    link = EvaluatedRun(vector, UserOptimizer(optimizer, vector), values)
    run = Run(link, model, vector, Exchange(link, vector, None))
    made = []
    with run:
        for (x,) in run.loader(TensorDataset(torch.ones(12, 2)), 4):
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            while run.wants_evaluation:
                with run.shared_weights():
                    made.append(model.bias.item())
                    run.report(bias=made[-1])
    assert run.ended == "finished"
    assert made == evaluated
    assert [answer.metrics for answer in link.answers] == [{"bias": value} for value in values]
