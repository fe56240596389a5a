"""Evaluations: who was asked answers, and only numbers count."""

from __future__ import annotations

import math

import pytest

from dlctl import messages as m
from dlctl.roles.coordinator.evaluation import Evaluations
from dlctl.roles.coordinator.membership import Membership
from dlctl.roles.coordinator.records import AddEvent, History
from dlctl.util.names import HOME_AGENT

GOOD = {"accuracy": 0.5, "loss": 2.0}


@pytest.fixture
def evaluations() -> Evaluations:
    """worker-0 was asked."""
    members = Membership([HOME_AGENT], dict.fromkeys(("worker-0", "worker-1"), HOME_AGENT), {})
    for daemon in members.daemons.values():
        daemon.begin(0.0)
        daemon.restore_state("running")
        daemon.asked_for_data = True
    made = Evaluations(History(1.0), members, lambda: 7)
    made.begin(0.0)
    assert made.worker == "worker-0"
    made.context.clear()
    return made


def test_only_the_worker_that_was_asked_is_believed(evaluations: Evaluations) -> None:
    assert evaluations.on_evaluated(m.Evaluated(1, "worker-1", GOOD, ""), 1.0) is None
    assert evaluations.newest is None
    assert evaluations.worker == "worker-0", "it is still waited for"
    assert "evaluate" in evaluations.context.retries
    assert evaluations.on_evaluated(m.Evaluated(1, "worker-0", GOOD, ""), 1.0) == (7, GOOD)
    assert evaluations.newest == GOOD | {"step": 7}
    assert not evaluations.worker


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named_and_not_kept(evaluations: Evaluations, odd: float) -> None:
    metrics = {"accuracy": 0.5, "loss": odd, "perplexity": odd}
    kept = evaluations.on_evaluated(m.Evaluated(1, "worker-0", metrics, ""), 1.0)
    assert kept == (7, {"accuracy": 0.5})
    assert evaluations.newest == {"accuracy": 0.5, "step": 7}
    (event,) = [effect for effect in evaluations.context.clear() if isinstance(effect, AddEvent)]
    assert (event.kind, event.daemon) == ("evaluation", "worker-0")
    assert event.text == "step 7: not finite: loss, perplexity"
