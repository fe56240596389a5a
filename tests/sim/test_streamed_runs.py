"""Runs over a stream: each sample is counted once, whoever dies and however often it is resumed."""

from __future__ import annotations

from typing import Any

import pytest
from simulated import ACCOUNT, job_file

from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.checkers import (
    AcksChecker,
    Book,
    LedgerChecker,
    LivenessChecker,
    NothingLeft,
    SavedChecker,
    StreamChecker,
    TermsChecker,
)
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import LeastSquares, StreamedLedger
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.store import Store

LENGTHS = (50, 23, 32)
BATCH, PORTION = 4, 8


def seen_of(epochs: int) -> StreamChecker:
    return StreamChecker(LENGTHS, BATCH, epochs)


def simulate(
    seen: StreamChecker,
    store: Store | None = None,
    cells: int = 400,
    lengths: tuple[int, ...] = LENGTHS,
    names: tuple[str, ...] = (),
    **options: Any,
) -> Simulation:
    problem = StreamedLedger(shards=2, cells=cells, lengths=lengths, names=names)
    options = {"samples": sum(LENGTHS), "checkpoint_s": 0.7} | options
    job = job_file(
        3, 2, optimizer=ACCOUNT, batch_size=BATCH, portion_batches=PORTION // BATCH,
        timeouts={"resend_s": 0.3, "grace_s": 2.0, "silent_s": 2.0}, **options,
    )  # fmt: skip
    book = Book(problem)
    promises = [book, AcksChecker(book), TermsChecker(), LivenessChecker(8.0), NothingLeft()]
    if store is None:
        promises += [LedgerChecker(book), SavedChecker(book)]
    return Simulation(
        job, problem, compute=ComputeOptions(step_s=0.05), checkers=(seen, *promises), store=store
    )


def finished(outcome: Outcome) -> Outcome:
    assert outcome.state == "finished", outcome.reason
    return outcome


def events(outcome: Outcome) -> list[str]:
    return [text for _, kind, _, text in outcome.store.events if kind == "stream"]


MANY: dict[str, dict[str, Any]] = {
    "downpour": {"push_every_steps": 30},
    "sync": {},
    "diloco": {"local_steps": 30},
}


@pytest.mark.parametrize("method", MANY)
def test_every_sample_is_computed_once(method: str) -> None:
    """Also by replicas that push once in thirty steps: where a shard ends is known before."""
    seen = seen_of(2)
    job = job_file(
        2, 1, algorithm=(method, MANY[method]), batch_size=BATCH, portion_batches=PORTION // BATCH,
        samples=2 * sum(LENGTHS),
    )  # fmt: skip
    problem = LeastSquares(samples=sum(LENGTHS))
    problem.lengths = LENGTHS  # type: ignore[attr-defined]
    outcome = finished(Simulation(job, problem, checkers=(seen,)).run())
    assert seen.computed == seen.done == seen.everything()
    assert outcome.reason.startswith("210 ")
    assert outcome.store.run["samples"] == 210
    assert events(outcome) == [
        "the stream has ended after 105 samples, and is read again until job.stop is reached"
    ]


@pytest.mark.parametrize("after_s", [0.3, 0.8, 1.1])
@pytest.mark.parametrize("names", [("worker-1",), (COORDINATOR,), ("worker-0", COORDINATOR)])
def test_who_dies_costs_no_sample(names: tuple[str, ...], after_s: float) -> None:
    seen = seen_of(2)
    sim = simulate(seen, samples=2 * sum(LENGTHS))
    for name in names:
        sim.at(after_s, lambda name=name: sim.world.kill(name))
    outcome = finished(sim.run(200.0))
    assert seen.done == seen.everything()
    assert len(events(outcome)) == 1


@pytest.mark.parametrize("stop_s", [0.5, 0.9])
def test_a_run_goes_on_where_its_checkpoint_was(stop_s: float) -> None:
    first, second = seen_of(2), StreamChecker(LENGTHS, BATCH, 0)
    sim = simulate(first, samples=2 * sum(LENGTHS))
    sim.request(stop_s, "stop", {"checkpoint": True, "grace_s": 5.0})
    stopped = sim.run(200.0)
    assert stopped.state == "stopped", stopped.reason
    second.everything = lambda: first.everything() - first.done  # type: ignore[method-assign]
    finished(simulate(second, stopped.store, samples=2 * sum(LENGTHS)).run(200.0))
    assert first.done + second.done == first.everything()
    assert first.done
    assert second.computed == second.done


def test_evaluations_go_by_steps_or_by_passes() -> None:
    for options, expected in (({"evaluate_steps": 10}, 5), ({"evaluate_epochs": 1.0}, 2)):
        outcome = finished(simulate(seen_of(2), samples=2 * sum(LENGTHS), **options).run(200.0))
        evaluated = [text for _, kind, _, text in outcome.store.events if kind == "evaluation"]
        assert len(evaluated) >= expected, options


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"epochs": 1.0},
            "an iterable dataset is a stream, whatever its __len__ says, so job.stop cannot",
        ),
        ({"algorithm": ("sandblaster", {})}, '"sandblaster" goes over the whole dataset again'),
    ],
)
def test_what_needs_the_length_is_one_error(options: dict[str, Any], text: str) -> None:
    problem = StreamedLedger(lengths=LENGTHS)
    job = job_file(1, 1, **({"samples": 100} if "epochs" not in options else {}), **options)
    outcome = Simulation(job, problem).run(100.0)
    assert outcome.state == "failed"
    assert text in outcome.reason
    assert "under [job]" in outcome.reason or "[algorithm]" in outcome.reason


def test_a_stream_that_gives_nothing_fails_the_run() -> None:
    outcome = Simulation(job_file(2, 1, samples=100), StreamedLedger(lengths=(0, 0))).run(100.0)
    assert (outcome.state, "samples" in outcome.reason) == ("failed", True)


def test_new_shards_are_read_by_the_run_that_resumes_and_no_sample_twice() -> None:
    """Wherever their names are in the order: what is done of the others belongs to their names."""
    names, more = ("b", "d", "f"), ("b", "d", "f", "a", "e")
    lengths = (*LENGTHS, 9, 31)
    first = StreamChecker(LENGTHS, BATCH, 2, names)
    sim = simulate(first, samples=2 * sum(LENGTHS), names=names)
    sim.request(0.5, "stop", {"checkpoint": True, "grace_s": 5.0})
    stopped = sim.run(200.0)
    assert stopped.state == "stopped", stopped.reason
    assert 0 < sum(first.done.values()) < sum(LENGTHS)
    second = StreamChecker(lengths, BATCH, 0, more)
    everything = StreamChecker(lengths, BATCH, 1, more).everything()
    second.everything = lambda: everything - first.done  # type: ignore[method-assign]
    again = simulate(second, stopped.store, samples=sum(lengths), names=more, lengths=lengths)
    finished(again.run(200.0))
    assert first.done + second.done == everything


def test_a_run_does_not_resume_without_a_shard_that_it_had() -> None:
    job = job_file(1, 1, samples=100)
    first = finished(Simulation(job, StreamedLedger(lengths=LENGTHS)).run(100.0))
    more = job_file(1, 1, samples=200)
    again = Simulation(more, StreamedLedger(lengths=LENGTHS[:2]), store=first.store).run(100.0)
    assert again.state == "failed"
    assert 'the shards of worker-0 are others than those of this run: it lacks "part-002"' in (
        again.reason
    )
    assert "--fresh" in again.reason
