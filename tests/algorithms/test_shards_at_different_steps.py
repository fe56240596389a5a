"""A shard that has gone on without a replica is ahead of the others: no gradient is of both."""

from __future__ import annotations

import numpy as np
import pytest
from builders import site

from dlctl.algorithms.base import ReplicaSide
from dlctl.algorithms.methods import local_sgd, sync
from dlctl.algorithms.needs import Gradient, NextBatch, Read, Step, View, Write

LOCAL = local_sgd.Options(local_steps=1)
OVERLAP = local_sgd.Options(local_steps=1, overlap=True)


def story(side: ReplicaSide, newest: list[int]) -> list[str]:
    """What a replica does while its fetches bring these steps of the newest shard."""
    events, values = list[str](), iter(newest)
    run = side.run()
    request = next(run)
    while True:
        answer: object = None
        match request:
            case Read():
                if (step := next(values, None)) is None:
                    return events
                answer = side.view = View(step, step)
                events.append(f"{'' if request.wait else 'under way: '}{step}")
            case Gradient():
                answer = Step(np.ones(2, np.float32), 8, 1.0)
                events.append("compute")
            case Write():
                events.append(f"push {request.samples} for {request.clock}")
            case _:
                answer = NextBatch(0, 0, False)
        request = run.send(answer)


@pytest.mark.parametrize("method", [sync, local_sgd], ids=["sync", "local-sgd"])
def test_a_replica_that_a_shard_has_passed_over_computes_when_all_are_at_the_same_step(method):
    options = LOCAL if method is local_sgd else sync.Options()
    side = method.Replica(site(options, np.zeros(2, np.float32)))
    side.begin("new")
    assert story(side, [0, 1, 3, 5, 6]) == [
        "0", "compute", "push 8 for 0",
        "1", "compute", "push 8 for 1",
        "3", "push 0 for 3", "5", "push 0 for 5",
        "6", "compute", "push 8 for 6",
    ]  # fmt: skip


def test_one_that_is_ahead_of_its_mean_waits_for_the_next_one_then():
    """The steps that it has made meanwhile are pushed: they are its own."""
    side = local_sgd.Replica(site(OVERLAP, np.zeros(2, np.float32)))
    side.begin("new")
    assert story(side, [0, 1, 3, 4, 5]) == [
        "0", "compute", "push 8 for 0",
        "under way: 1", "compute", "push 8 for 1",
        "under way: 3", "compute", "push 8 for 3",
        "4", "compute", "push 8 for 4",
        "under way: 5", "compute", "push 8 for 5",
    ]  # fmt: skip
