"""A daemon that has reached its coordinator again says at once who it is, and what was lost."""

from __future__ import annotations

from server_lives import Keeping, Life

from dlctl.roles.agent.agent import Agent
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.protocol.files import Transfers, WantedFile
from dlctl.roles.server.server import Server
from dlctl.wire import messages as m
from dlctl.wire.machine import DeadlineReached, Reconnected, Send, Started
from dlctl.wire.messages import Register

BACK = Reconnected(COORDINATOR, lost_at=0.2)


def asked(machine: Agent | Server, now: float) -> list[type]:
    """What a machine that was connected again at this time sends to the coordinator."""
    effects = [*machine.handle(BACK, now), *machine.handle(DeadlineReached(), now)]
    return [type(e.message) for e in effects if isinstance(e, Send) and e.peer == COORDINATOR]


def test_what_an_agent_had_asked_is_asked_again_and_not_a_second_later() -> None:
    agent = Agent(Register("run-1", "agent", "agent-0", 1, 1, "here", "0"), 1.0)
    agent.handle(Started(), 0.0)
    assert asked(agent, 0.3) == [m.Register]
    assert agent.deadline() == 1.3, "and then as patiently as at first"


def test_what_was_asked_over_the_new_connection_waits_for_its_answer() -> None:
    agent = Agent(Register("run-1", "agent", "agent-0", 1, 1, "here", "0"), 1.0)
    agent.handle(Started(), 0.25)
    assert asked(agent, 0.3) == []


def test_pieces_of_files_are_asked_for_again_as_all_else() -> None:
    context = Context(1.0)
    transfers = Transfers(context)
    transfers.fetch("agent-1", WantedFile("ckpt/a", 1000), lambda error, now: None, 0.0)
    (first,) = context.clear()
    assert context.retries.due(0.4) == []
    context.retries.again("agent-1", 0.2, 0.5)
    assert context.retries.due(0.5) == [first]


def test_a_server_reports_so_that_the_coordinator_learns_whose_connection_it_is() -> None:
    life = Life(Keeping())
    assert asked(life.server, 0.3) == [m.Report]
