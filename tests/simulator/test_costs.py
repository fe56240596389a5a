"""Durations in virtual time, drawn from those of a real run."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from daemons.simulator.costs import Costs, Durations
from dlctl.records.work_times import SUM, WorkTimes
from dlctl.roles.protocol.effects import Compute
from dlctl.sim.request import SimulationRequest

STEP = Compute(0, 0, 1, 0)


def costs(kind: str, seconds: Iterable[float], cpu_s: float) -> Costs:
    """Of a run in which this kind of work took so long, and so much CPU time, each time."""
    times = WorkTimes()
    for wall_s in seconds:
        times.add(wall_s, cpu_s)
    request = SimulationRequest(directory="", step_s=0.1, times={"*": {kind: times.to_json()}})
    return Costs(Durations.of_request(request), seed=1)


@pytest.mark.parametrize("spread_s", [0.0001, 0.001, 0.01])
def test_steps_have_the_mean_and_the_spread_of_the_recorded_ones(spread_s: float) -> None:
    """In a barrier the longest one counts."""
    rng = np.random.default_rng(1)
    recorded = np.clip(rng.normal(0.05, spread_s, 2000), 0.002, None)
    made = costs("step", map(float, recorded), 0.002)
    drawn = np.array([made.of(0, STEP).seconds for _ in range(2000)])
    assert drawn.mean() == pytest.approx(recorded.mean(), rel=0.02)
    assert drawn.reshape(-1, 4).max(1).mean() == pytest.approx(
        recorded.reshape(-1, 4).max(1).mean(), rel=0.03
    )


def test_a_sum_takes_what_the_shortest_ones_took_and_no_wait_for_other_members() -> None:
    made = costs(SUM, [0.003] * 200 + [0.013] * 200, 0.001)
    assert made.of_ring(0) == pytest.approx(0.002, rel=0.1)
    assert np.mean([made.of_sum(0) for _ in range(2000)]) == pytest.approx(0.001, rel=0.1)
    assert costs("step", [0.1], 0.1).of_ring(0) == 0.0
