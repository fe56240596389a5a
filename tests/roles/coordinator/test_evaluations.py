"""Evaluations: who was asked answers, and only numbers count."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from dlctl import registry
from dlctl.job.config import Job, JobFile, Stop
from dlctl.records.best import Target
from dlctl.records.evaluated import Result
from dlctl.roles.coordinator.evaluation import Evaluations
from dlctl.roles.coordinator.link_bytes import LinkBytes
from dlctl.roles.coordinator.members.membership import Membership
from dlctl.roles.coordinator.records import AddEvent, EventContext
from dlctl.roles.coordinator.run_state import RunState
from dlctl.roles.coordinator.status import Reports, Totals
from dlctl.roles.coordinator.training.bandwidths import Bandwidths
from dlctl.roles.protocol.keyring import Keyring
from dlctl.util.names import HOME_AGENT
from dlctl.wire import messages as m

GOOD = {"accuracy": 0.5, "loss": 2.0}


@pytest.fixture
def evaluations() -> Evaluations:
    """worker-0 was asked."""
    members = Membership([HOME_AGENT], dict.fromkeys(("worker-0", "worker-1"), HOME_AGENT), {})
    for daemon in members.daemons.values():
        daemon.begin(0.0)
        daemon.restore_state("running")
        daemon.asked_for_data = True
    made = Evaluations(EventContext(1.0), members, lambda: 7)
    made.begin(0.0)
    assert made.worker == "worker-0"
    made.context.clear()
    return made


def test_only_the_worker_that_was_asked_is_believed(evaluations: Evaluations) -> None:
    assert evaluations.on_evaluated(m.Evaluated(1, "worker-1", GOOD, ""), 1.0) is None
    assert evaluations.newest is None
    assert evaluations.worker == "worker-0", "it is still waited for"
    assert "evaluate" in evaluations.context.retries
    assert evaluations.on_evaluated(m.Evaluated(1, "worker-0", GOOD, ""), 1.0) == Result(7, GOOD)
    assert evaluations.newest == Result(7, GOOD)
    assert not evaluations.worker


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named_and_not_kept(evaluations: Evaluations, odd: float) -> None:
    metrics = {"accuracy": 0.5, "loss": odd, "perplexity": odd}
    kept = evaluations.on_evaluated(m.Evaluated(1, "worker-0", metrics, ""), 1.0)
    assert kept == evaluations.newest == Result(7, {"accuracy": 0.5})
    (event,) = [effect for effect in evaluations.context.clear() if isinstance(effect, AddEvent)]
    assert (event.kind, event.daemon) == ("evaluation", "worker-0")
    assert event.text.endswith(": loss, perplexity")


# ---------------------------------------------------------------- the target


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("acc@5>=.5", Target("acc@5", ">=", 0.5)),
        ("val/err < +1e+3", Target("val/err", "<", 1e3)),
        (" val err  <= 2", Target("val err", "<=", 2.0)),
    ],
)
def test_a_target_is_read_as_the_job_file_has_it(text: str, target: Target) -> None:
    assert Target.parse(text) == target


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["accuracy", "loss"], 'evaluate returns accuracy, loss; did you mean "accuracy"?'),
        (["perplexity"], "evaluate returns perplexity"),
        ([], "the task has no evaluate, or it returns no metrics"),
        ([f"top-{n}" for n in range(20)], "top-15, ..."),
    ],
)
def test_a_target_out_of_reach_names_the_metrics_that_there_are(names: list[str], why: str) -> None:
    text = Target.parse("acuracy >= 0.5").missing_in(names)
    assert text.startswith("the target acuracy >= 0.5 ")
    assert text.endswith(why)
    assert not Target.parse("acuracy >= 0.5").missing_in([*names, "acuracy"])


class Office:
    """What the coordinator does about an evaluation: the end of the run, if that follows."""

    def __init__(self, evaluations: Evaluations, stop: Stop) -> None:
        job = JobFile(job=Job(name="a", task="train.py:task", stop=stop))
        method = registry.load("algorithms", job.algorithm.name)
        evaluations.target = Target.parse(stop.target or "")
        self.evaluations, self.ends = evaluations, []
        run = RunState("a-1", job, method, Keyring(b""), evaluations.context, evaluations.members)
        links = LinkBytes(evaluations.members, {}, {})
        recutting: Any = SimpleNamespace(bandwidths=Bandwidths(evaluations.members))
        self.reports = Reports(
            run, self, None, evaluations, None, Totals({}, {}), links, recutting  # type: ignore[arg-type]
        )  # fmt: skip

    def end(self, state: str, reason: str, now: float) -> None:
        self.ends.append((state, reason))

    def hears(self, metrics: dict[str, float], error: str = "") -> list[str]:
        """What becomes an event of the kind "target"."""
        if not self.evaluations.worker:
            self.evaluations.begin(1.0)
        number, worker = self.evaluations.asked.number, self.evaluations.worker
        self.reports.on_evaluated(b"", m.Evaluated(number, worker, metrics, error), 1.0)
        effects = self.evaluations.context.clear()
        return [e.text for e in effects if isinstance(e, AddEvent) and e.kind == "target"]


@pytest.mark.parametrize("metrics", [{"accuracy": 0.9}, {}])
def test_a_target_that_cannot_be_reached_is_told_once_and_the_run_goes_on(
    evaluations: Evaluations, metrics: dict[str, float]
) -> None:
    office = Office(evaluations, Stop(target="acuracy >= 0.5", seconds=8.0))
    (text,) = office.hears(metrics)
    assert evaluations.out_of_reach == text
    assert office.hears(metrics) == []
    assert office.hears({"acuracy": 0.4}) == []
    assert evaluations.out_of_reach == ""
    assert office.ends == []


def test_a_run_that_nothing_else_would_end_fails_at_once(evaluations: Evaluations) -> None:
    office = Office(evaluations, Stop(target="acuracy >= 0.5"))
    assert office.hears({}, "it has no model of this run") == []
    assert office.hears({"acuracy": math.nan}) == [], "it may become a number"
    assert office.ends == []
    assert len(office.hears({"accuracy": 0.9})) == 1
    ((state, reason),) = office.ends
    assert state == "failed"
    assert '"accuracy"' in reason
