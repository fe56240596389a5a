"""Who starts the coordinator again, and when nobody has to."""

from __future__ import annotations

from contextlib import closing

import pytest

from daemons.agent.supervision import Supervision
from daemons.loop import Loop
from dlctl.config import Servers
from dlctl.machine import DeadlineReached, Exit, Started, StopRequested
from dlctl.roles.effects import RestartCoordinator
from dlctl.rundb import RunDb

LIMIT_S = 5.0


class Restarts:
    """An agent whose coordinator is away: it wants another one, and ends when it is told to."""

    def __init__(self) -> None:
        self.until = float("inf")

    def handle(self, event, now):
        match event:
            case Started():
                self.until = now + LIMIT_S
                return [RestartCoordinator()]
            case StopRequested(reason):
                return [Exit(0, reason)]
            case DeadlineReached():
                return [Exit(1, "nobody said anything")]
        return []

    def deadline(self):
        return self.until


@pytest.mark.parametrize("state", ["stopped", "finished", "failed"])
def test_a_run_that_somebody_has_ended_meanwhile_gets_no_coordinator_and_its_agent_leaves(
    tmp_path, state
):
    """A command may have done that, and been killed before it could end the agent."""
    with closing(RunDb(tmp_path, create=True)) as db:
        db.put_run(state=state, pid=None)
        db.commit()
    loop = Loop()
    Supervision(tmp_path, loop, still_s=10.0, servers=Servers())
    assert loop.run(Restarts()) == 0
