"""Whether a run has enough rounds for the momentum of its servers' optimiser."""

from __future__ import annotations

import dataclasses

import pytest

from dlctl.job import rounds
from dlctl.job.config import Choice, Job, JobFile, Schedule, Servers, Stop, Workers

STEPS = 10
NESTEROV = Choice(name="momentum", options={"lr": 0.7, "momentum": 0.9, "nesterov": True})
MEAN = Choice(name="sgd", options={"lr": 1.0})


def job(stop: Stop, outer: Choice = NESTEROV, **more: object) -> JobFile:
    """Two workers, batches of 8 samples: 160 samples a round."""
    made = JobFile(
        job=Job(name="x", task="t.py:t", stop=stop),
        algorithm=Choice(name="diloco", options={"local_steps": STEPS}),
        optimizer=outer,
        servers=Servers(count=1),
        workers=Workers(count=2, batch_size=8),
    )
    return dataclasses.replace(made, **more)


@pytest.mark.parametrize(
    ("stop", "dataset", "found"),
    [
        (Stop(steps=2 * STEPS * 18), 0, None),
        (Stop(steps=2 * STEPS * 18 - 1), 0, 17),
        (Stop(samples=160 * 10), 0, 10),
        (Stop(epochs=5), 320, 10),
        (Stop(epochs=9), 320, None),
        (Stop(epochs=5, samples=160 * 4), 320, 4),
        (Stop(samples=10), 0, 0),
    ],
)
def test_a_round_is_so_many_steps_of_every_worker(stop, dataset, found) -> None:
    few = rounds.few(job(stop), dataset)
    assert (few.rounds if few else None) == found


@pytest.mark.parametrize("stop", [Stop(epochs=1), Stop(seconds=5.0), Stop(target="loss <= 1")])
def test_of_a_run_of_unknown_length_nothing_is_said(stop: Stop) -> None:
    assert rounds.few(job(stop)) is None


@pytest.mark.parametrize(
    ("outer", "needed"),
    [
        (NESTEROV, 18),
        (MEAN, 1),
        (Choice(name="momentum", options={"momentum": 0.5}), 2),
        (Choice(name="adam", options={"lr": 0.1, "beta1": 0.95}), 38),
    ],
)
def test_a_momentum_needs_twice_its_memory(outer: Choice, needed: int) -> None:
    enough = Stop(steps=2 * STEPS * needed)
    assert rounds.few(job(enough, outer)) is None
    few = rounds.few(job(Stop(steps=enough.steps - 1), outer))
    assert few is not None
    assert few.needed == needed


@pytest.mark.parametrize(
    ("schedule", "needed"),
    [
        (Schedule(kind="cosine"), 72),
        (Schedule(kind="linear", final=0.1), 72),
        (Schedule(kind="step", decay_at=(0.5,)), 72),
        (Schedule(kind="cosine", final=0.8), 18),
        (Schedule(kind="constant", warmup="5%"), 18),
    ],
)
def test_a_rate_that_goes_down_needs_four_times_as_many(schedule: Schedule, needed: int) -> None:
    few = rounds.few(job(Stop(steps=2 * STEPS), schedule=schedule))
    assert few is not None
    assert few.needed == needed


def test_with_the_steps_that_it_names_there_are_enough() -> None:
    for steps in (37, 100, 359):
        short = job(Stop(steps=steps))
        few = rounds.few(short)
        assert few is not None
        assert f"local_steps = {few.local_steps}" in few.text()
        assert rounds.few(short, 0, few.local_steps) is None
        assert rounds.few(short, 0, few.local_steps + 1) is not None
    few = rounds.few(job(Stop(steps=35)))
    assert few is not None
    assert "local_steps" not in few.text(), "it is too short for any"


def test_methods_without_rounds_in_the_servers_have_none() -> None:
    short = Stop(steps=5)
    assert rounds.few(job(short, servers=Servers(count=0))) is None
    assert rounds.few(job(short, algorithm=Choice(name="downpour", options={}))) is None
    assert rounds.few(job(short, workers=Workers(count=2, batch_size="auto"))) is None
