"""All metrics must fit into one message: too many of them, or too long a name, are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from daemons.worker.task.user_task import Task, TaskError
from dlctl.roles.protocol.limits import METRIC_NAME_CHARS_MAX, METRICS_MAX
from dlctl.roles.worker.leases import Counted, Portion
from dlctl.wire import codec
from dlctl.wire import messages as m


class Measured:
    def __init__(self, metrics: dict[str, Any]) -> None:
        self.metrics = metrics

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def dataset(self) -> list[int]:
        return [0]

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch).mean()

    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        return self.metrics


def test_the_largest_evaluation_that_is_allowed_fits_into_a_message():
    names = [f"{n:02d}".ljust(METRIC_NAME_CHARS_MAX, "\U0001f600") for n in range(METRICS_MAX)]
    found = Task(Measured(dict.fromkeys(names, 0.5))).evaluate(nn.Linear(1, 1))
    codec.encode(m.Evaluated(1, "worker-0", found, ""))
    portion = Portion(m.Lease(1, 2, 3, 0, 8), 8)
    portion.count(Counted(portion, 8, 0.5, found, 1), 1)
    portion.count(Counted(portion, 8, 0.5, {"one more": 1.0}, 1), 1)
    sums = portion.metric_sums
    assert sums == {name: [4.0, 8] for name in names}
    codec.encode(m.PortionDone(1, 2, 3, 4, 5, 6, 7.0, sums))
    codec.encode(m.Report("worker-0", 1, "computing", "", {"task": found}))


def test_one_metric_more_is_refused_with_the_limit():
    task = Task(Measured({str(n): n for n in range(METRICS_MAX + 1)}))
    with pytest.raises(TaskError, match=r"65.*64") as caught:
        task.evaluate(nn.Linear(1, 1))
    assert "test_metric_limits.py:" in (caught.value.where or "")


def test_a_name_that_is_too_long_is_refused_with_the_limit():
    task = Task(Measured({"accuracy": 1, "x" * 201: 2}))
    with pytest.raises(TaskError, match=r"201.*200"):
        task.evaluate(nn.Linear(1, 1))
