"""When an agent starts its coordinator again: at once, but not faster and faster for ever."""

from __future__ import annotations

import pytest

from dlctl.roles.agent.agent import RESTART_MAX_S, WORKS_S, Agent
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.effects import CoordinatorGone, RestartCoordinator
from dlctl.wire import messages as m
from dlctl.wire.machine import DeadlineReached, Effect, Received, Started
from dlctl.wire.messages import Register


class Watched:
    """An agent, and the coordinator that dies under it."""

    def __init__(self) -> None:
        self.agent = Agent(Register("run-1", "agent", "agent-0", 1, 1, "here", "0"), 1.0)
        self.agent.handle(Started(), 0.0)
        self.now = 100.0
        self.hear()

    def hear(self) -> None:
        self.agent.handle(Received(COORDINATOR, m.Heard()), self.now)

    def pause_s(self) -> float:
        """The coordinator dies now: how long until it is started again."""
        died_at = self.now
        effects: list[Effect] = self.agent.handle(CoordinatorGone(), self.now)
        while RestartCoordinator() not in effects:
            deadline = self.agent.deadline()
            assert deadline is not None
            self.now = max(self.now, deadline)
            effects = self.agent.handle(DeadlineReached(), self.now)
        return self.now - died_at


def test_a_coordinator_that_has_worked_is_started_again_at_once() -> None:
    watched = Watched()
    for _ in range(3):
        assert watched.pause_s() == 0.0
        watched.now += WORKS_S
        watched.hear()


def test_one_that_is_heard_and_dies_soon_after_every_start_waits_longer_and_longer() -> None:
    watched = Watched()
    pauses = []
    for _ in range(8):
        pauses.append(watched.pause_s())
        watched.now += 0.5
        watched.hear()
    assert pauses == [0.0, 1.0, 2.0, 4.0, *[RESTART_MAX_S] * 4]


def test_one_that_dies_before_it_is_heard_waits_longer_and_longer_up_to_a_limit() -> None:
    watched = Watched()
    pauses = [watched.pause_s()]
    for _ in range(8):
        watched.now += 0.3
        pauses.append(watched.pause_s())
    assert pauses[0] == 0.0
    assert pauses[1:] == pytest.approx(sorted(pauses[1:]))
    assert pauses[-1] == pytest.approx(RESTART_MAX_S)
