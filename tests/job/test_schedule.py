"""The rate over a run is what torch's schedulers make of it on one machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from dlctl.job import schedule
from dlctl.job.config import Gradients, Job, JobFile, Schedule, Stop, Workers

BATCH, WHOLE, PEAK = 8, 100, 0.3
"""Samples of a step, steps of the run."""


def job(stop: Stop | None = None, batch_size: int = BATCH, **how: Any) -> JobFile:
    return JobFile(
        job=Job(name="j", task="t.py:task", stop=stop or Stop(steps=WHOLE)),
        workers=Workers(batch_size=batch_size),
        schedule=Schedule(**how),
    )


def rates(steps: int = WHOLE, **how: Any) -> list[float]:
    factor = schedule.factor(job(**how), 0)
    assert factor is not None
    return [PEAK * factor(BATCH * step) for step in range(steps)]


def of_torch(kind: Any, steps: int = WHOLE, **how: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    scheduler, found = kind(optimizer, **how), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


CASES = {
    "cosine": (
        {"kind": "cosine", "final": 0.1},
        lr_scheduler.CosineAnnealingLR, {"T_max": WHOLE, "eta_min": 0.1 * PEAK},
    ),
    "linear": (
        {"kind": "linear", "final": 0.2},
        lr_scheduler.LinearLR, {"start_factor": 1.0, "end_factor": 0.2, "total_iters": WHOLE},
    ),
    "step": (
        {"kind": "step", "decay_at": (0.5, 0.75), "gamma": 0.3},
        lr_scheduler.MultiStepLR, {"milestones": [50, 75], "gamma": 0.3},
    ),
    "warm-up": (
        {"warmup": "25 steps"},
        lr_scheduler.LambdaLR, {"lr_lambda": lambda step: min(1.0, step / 25)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_torch_s_at_every_step(name: str) -> None:
    ours, kind, theirs = CASES[name]
    assert rates(**ours) == pytest.approx(of_torch(kind, **theirs), rel=0, abs=1e-12)


@pytest.mark.parametrize("warmup", ["20%", "20 steps", "160 samples"])
def test_after_a_warm_up_follows_the_rest(warmup: str) -> None:
    def both(optimizer: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
        parts = [
            lr_scheduler.LambdaLR(optimizer, lambda step: step / 20),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=80),
        ]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[20])

    ours = rates(kind="cosine", warmup=warmup)
    assert ours == pytest.approx(of_torch(both), rel=0, abs=1e-12)


def test_stable_then_decay() -> None:
    found = rates(kind="wsd", warmup="10%", decay_at=(0.8,), final=0.5)
    assert found[10:80] == pytest.approx([PEAK] * 70)
    assert found[90] == pytest.approx(0.75 * PEAK)
    factor = schedule.factor(job(kind="wsd", final=0.5), 0)
    assert factor is not None
    assert [factor(BATCH * step) for step in (90, 95, 100, 1000)] == pytest.approx(
        [1, 0.75, 0.5, 0.5]
    )


def test_a_rate_for_more_workers_is_warmed_up_to_from_that_of_one() -> None:
    """Goyal 2017: from eta to k eta, by the same amount at every step, then what follows."""
    goyal = Workers(batch_size=BATCH, count=8)
    how = {"kind": "step", "decay_at": (0.5,), "warmup": "10 steps", "lr_workers": 1}
    for name, k in (("linear", 8.0), ("sqrt", 8.0**0.5)):
        one = replace(job(**how, lr_scaling=name), workers=goyal)
        factor = schedule.factor(one, 0)
        assert factor is not None
        wanted = [*np.linspace(1, k, 11), *[k] * 39, *[0.1 * k] * 50]
        assert [factor(BATCH * step) for step in range(100)] == pytest.approx(wanted, abs=1e-12)


def test_a_new_number_of_workers_changes_the_rate_over_a_warm_up() -> None:
    one = replace(
        job(warmup="10 steps", lr_scaling="linear"), workers=Workers(batch_size=BATCH, count=2)
    )
    scale = schedule.first_scale(one)
    for since, workers in ((400, 4), (440, 1)):  # The second one while the first is under way.
        scale = scale.to(schedule.multiple(one, workers), since, 10 * BATCH)
    factor = schedule.factor(one, 0, scale)
    assert factor is not None
    assert [factor(samples) for samples in (40, 80, 440, 480, 520, 700)] == pytest.approx(
        [0.5 * 1.5, 1.5, 1.5, 1.0, 0.5, 0.5]
    )


@pytest.mark.parametrize(
    ("stop", "over", "whole"),
    [
        (Stop(steps=10), "", 80),
        (Stop(samples=33), "", 33),
        (Stop(epochs=0.5), "", 500),
        (Stop(epochs=2, steps=10), "", 80),
        (Stop(seconds=1), "50_000 steps", 400_000),
        (Stop(steps=10), "7 samples", 7),
    ],
)
def test_how_long_the_run_is(stop: Stop, over: str, whole: float) -> None:
    assert schedule.whole_run(job(stop, over=over), 1000) == whole


def test_steps_of_several_batches_are_longer() -> None:
    one = job(Stop(steps=10))
    several = JobFile(job=one.job, workers=one.workers, gradient=Gradients(accumulate=4))
    assert schedule.whole_run(several, 0) == 4 * schedule.whole_run(one, 0)


def test_without_a_schedule_nothing_changes() -> None:
    assert schedule.factor(job(), 0) is None


@pytest.mark.parametrize(
    ("stop", "how", "key", "what"),
    [
        (Stop(seconds=3), {"kind": "cosine"}, "kind", "how long the run is"),
        (Stop(target="a >= 1"), {"warmup": "5%"}, "warmup", "how long the run is"),
        (Stop(steps=10), {"warmup": "11 steps"}, "warmup", "longer than the run"),
        (Stop(steps=10), {"warmup": "soon"}, "warmup", "is not a length"),
        (Stop(steps=10), {"over": "-3 steps"}, "over", "is not a length"),
        (Stop(steps=10), {"over": "50%"}, "over", "not a part"),
        (Stop(steps=10), {"kind": "step"}, "kind", "goes down nowhere"),
        (Stop(steps=10), {"kind": "cosine", "decay_at": (0.5,)}, "decay_at", "has none"),
        (Stop(steps=10), {"lr_workers": 3}, "lr_workers", "no rate goes by it"),
    ],
)
def test_what_cannot_be_followed_is_found_before_the_run(
    stop: Stop, how: dict[str, Any], key: str, what: str
) -> None:
    ((where, message, _),) = schedule.faults(job(stop, **how))
    assert where == ("schedule", key)
    assert what in message


def test_a_warm_up_that_the_dataset_is_too_small_for_is_found_when_that_is_known() -> None:
    small = job(Stop(epochs=1), warmup="100 samples")
    assert not list(schedule.faults(small))
    assert schedule.factor(small, 100) is not None
    with pytest.raises(ValueError, match=r"100 .* 99"):
        schedule.factor(small, 99)
