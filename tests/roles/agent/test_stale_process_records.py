"""An agent that knows more than its coordinator: the notes of that are old, and nobody waits."""

from __future__ import annotations

from dlctl.roles.agent.agent import Agent
from dlctl.roles.agent.children import ProcessStarted
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.effects import ProcessEnded, SignalProcess, StartProcess
from dlctl.roles.protocol.limits import STATUS_UNKNOWN
from dlctl.wire import messages as m
from dlctl.wire.machine import Configure, Effect, Received, Send
from dlctl.wire.messages import Register

SPAWN_5 = m.Spawn("worker-1", "worker", 5, "")


def agent() -> Agent:
    return Agent(Register("run-1", "agent", "agent-0", 1, 1, "here", "0"), 1.0)


def handle(one: Agent, message: m.Message) -> list[Effect]:
    return one.handle(Received(COORDINATOR, message), 1.0)


def exits(effects: list[Effect]) -> list[tuple[str, int, int]]:
    """(name, incarnation, status) of each end that is reported."""
    sent = [e.message for e in effects if isinstance(e, Send)]
    return [(e.name, e.incarnation, e.status) for e in sent if isinstance(e, m.ProcessExited)]


def with_dead_child(status: int) -> Agent:
    """Its worker-1.5 has died, and a coordinator that is gone has noted that."""
    one = agent()
    assert StartProcess(SPAWN_5) in handle(one, SPAWN_5)
    one.handle(ProcessStarted(m.Spawned("worker-1", 5, 77)), 1.0)
    one.handle(ProcessEnded(m.ProcessExited("worker-1", 5, status, ())), 1.0)
    handle(one, m.ExitNoted("worker-1", 5))
    assert ("exit", "worker-1", 5) not in one.context.retries
    return one


def test_an_agent_says_so_if_there_is_nobody_to_kill() -> None:
    one = agent()
    assert exits(handle(one, m.Kill("worker-1", 4, 9))) == [("worker-1", 4, STATUS_UNKNOWN)]
    assert ("exit", "worker-1", 4) in one.context.retries, "until it is noted"


def test_an_agent_that_is_to_kill_the_dead_says_how_they_ended() -> None:
    one = with_dead_child(-11)
    assert exits(handle(one, m.Kill("worker-1", 5, 9))) == [("worker-1", 5, -11)]
    assert exits(handle(one, m.Kill("worker-1", 4, 9))) == [("worker-1", 5, -11)]
    assert exits(handle(one, m.Kill("worker-1", 6, 9))) == [("worker-1", 6, STATUS_UNKNOWN)]


def test_whoever_lives_is_killed_and_reported_when_it_has_ended() -> None:
    one = agent()
    handle(one, SPAWN_5)
    one.handle(ProcessStarted(m.Spawned("worker-1", 5, 77)), 1.0)
    effects = handle(one, m.Kill("worker-1", 5, 9))
    assert effects == [SignalProcess("worker-1", 5, 9)]


def test_a_process_that_has_ended_is_not_said_to_be_started() -> None:
    one = with_dead_child(-9)
    for incarnation in (4, 5):
        effects = handle(one, m.Spawn("worker-1", "worker", incarnation, ""))
        assert exits(effects) == [("worker-1", 5, -9)]
        assert not [e for e in effects if isinstance(e, StartProcess)]
        assert not [e for e in effects if isinstance(e, Send) and isinstance(e.message, m.Spawned)]
    spawn = m.Spawn("worker-1", "worker", 6, "")
    assert StartProcess(spawn) in handle(one, spawn)


def test_an_agent_starts_with_the_settings_that_were_set_while_there_was_none() -> None:
    one = agent()
    effects = handle(one, m.Welcome("agent-0", 0, 0, b"", {"log_level": "debug"}))
    assert Configure("log_level", "debug") in effects
    assert one.live.log_level == "debug"
