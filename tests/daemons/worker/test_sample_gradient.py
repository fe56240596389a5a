"""The gradient that `dlctl compressors --job` measures with is one that a worker would push."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from daemons.worker import sample_gradient
from daemons.worker.building import build_replica
from daemons.worker.task.user_task import TaskError
from dlctl.errors import DlctlError
from dlctl.job import config

TASK = """
    import torch

    def model():
        layer = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.{weights}
        return layer

    def dataset():
        return [torch.full((3,), float(i)) for i in range(8)]

    def loss(model, batch):
        return (model(batch){loss}).mean()
    """
Job = Callable[..., config.JobFile]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job whose model is the sum of what it is given, unless told otherwise; batches of 4."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def make(
        loss: str = "",
        weights: str = "ones_(layer.weight)",
        every: int | str = 2,
        algorithm: config.Choice | None = None,
        **more: Any,
    ) -> config.JobFile:
        downpour = config.Choice(name="downpour", options={"push_every_steps": every})
        path = tmp_path / "measured_task.py"
        path.write_text(dedent(TASK).format(loss=loss, weights=weights))
        return config.JobFile(
            job=config.Job(name="measured", task=str(path)),
            algorithm=algorithm or downpour,
            data=config.Data(shuffle=False),
            workers=config.Workers(count=1, device="cpu", threads=1, batch_size=4),
            **more,
        )

    yield make
    for name in ("measured_task", "dlctl_task_measured_task"):
        sys.modules.pop(name, None)


def gradient(job, checkpoint):
    vector, layout = sample_gradient.gradient(job, checkpoint)
    assert vector.shape == (layout.size(),)
    return vector


def test_it_is_the_sum_over_the_batches_of_one_push(job: Job) -> None:
    total = gradient(job(), None)
    assert total.dtype == np.float32
    assert total.tolist() == [1.5 + 5.5] * 3  # the means of 0 to 3 and of 4 to 7


def test_with_automatic_pushes_it_is_that_of_one_batch_as_in_the_first_push(job: Job) -> None:
    assert gradient(job(every="auto"), None).tolist() == [1.5] * 3


def test_replicas_that_step_alone_push_the_steps_of_a_round(job: Job) -> None:
    """Of the squares the second gradient, 63 times the sum of the weights, is where the first step
    leads to: there it is 3 - 0.63.
    """
    alone = {
        "algorithm": config.Choice(name="local-sgd", options={"local_steps": 2}),
        "inner": config.Choice(name="sgd", options={"lr": 0.01}),
    }
    assert np.allclose(gradient(job(**alone), None), 0.01 * (1.5 + 5.5))
    steps = gradient(job(".square()", **alone), None)
    assert np.allclose(steps, 0.01 * (7 * 3 + 63 * 2.37))


@pytest.mark.parametrize("loss", [" / 0", " * 1e30", " * float('nan')", ".sub(1e30).square()"])
def test_a_gradient_that_is_not_finite_or_too_large_is_refused(job: Job, loss: str) -> None:
    with pytest.raises(TaskError, match="batch 0 ") as raised:
        gradient(job(loss), None)
    assert "measured_task.py:" in (raised.value.where or "")


def test_a_later_batch_is_named_too(job: Job) -> None:
    with pytest.raises(TaskError, match=r"batch 1 .* inf"):
        gradient(job(" / (batch.max() < 4)"), None)


def test_a_model_that_begins_with_a_nan_is_refused_by_the_parameter_s_name(job: Job) -> None:
    with pytest.raises(TaskError, match=r'"weight".* 3 of 3 '):
        gradient(job(weights="constant_(layer.weight, float('nan'))"), None)


def test_a_target_that_nobody_could_see_reached_is_refused(job: Job) -> None:
    made = job()
    aims = replace(made, job=replace(made.job, stop=config.Stop(target="accuracy >= 0.9")))
    with pytest.raises(TaskError, match="evaluate") as raised:
        build_replica(aims, slot=1)
    assert "measured_task.py:" in (raised.value.where or "")


def test_only_who_begins_the_run_needs_the_file_to_begin_with(job: Job, tmp_path: Path) -> None:
    made = job()
    missing = replace(made, job=replace(made.job, weights=str(tmp_path / "no.safetensors")))
    with pytest.raises(DlctlError):
        build_replica(missing, slot=0)
    assert build_replica(missing, slot=1).lacks_weights
    assert not build_replica(made, slot=1).lacks_weights
    by_itself = replace(missing, algorithm=config.Choice(name="toy-ring"))
    with pytest.raises(DlctlError):
        build_replica(by_itself, slot=1)
