"""A guest: when it asks for a slot again, when it gives up, and with which code it ends."""

from __future__ import annotations

from typing import Any

import pytest

from dlctl.roles.agent.children import ProcessStarted
from dlctl.roles.agent.guest import CRASHES_MAX, GOODBYE_S, MISSED_S_MAX, Guest
from dlctl.roles.protocol.authz import offence
from dlctl.roles.protocol.context import COORDINATOR, EXIT_FENCED, EXIT_POISONED
from dlctl.roles.protocol.effects import ProcessEnded, SignalProcess, StartProcess
from dlctl.wire import messages as m
from dlctl.wire.machine import DeadlineReached, Exit, Received, Send, Started, StopRequested

ME = m.Register("a-run", "guest", "guest-3", 17, 1, "laptop", "0")


class Machine:
    """A guest with a clock, that has joined as worker-3."""

    def __init__(self) -> None:
        self.guest, self.now, self.incarnation = Guest(ME, 1.0), 100.0, 0
        self.effects: list[Any] = []
        self.tell(Started())
        self.hear(m.Welcome("guest-3", 3, 0, b"", {}))
        self.spawn()

    def tell(self, event: Any) -> list[Any]:
        found = self.guest.handle(event, self.now)
        self.effects += found
        return found

    def hear(self, message: m.Message) -> list[Any]:
        return self.tell(Received(COORDINATOR, message, ""))

    def spawn(self) -> None:
        self.incarnation += 1
        assert any(
            isinstance(effect, StartProcess)
            for effect in self.hear(m.Spawn("worker-3", "worker", self.incarnation, ""))
        )
        self.tell(ProcessStarted(m.Spawned("worker-3", self.incarnation, 7)))

    def die(self, status: int) -> None:
        exited = m.ProcessExited("worker-3", self.incarnation, status, ())
        self.tell(ProcessEnded(exited))
        self.hear(m.ExitNoted("worker-3", self.incarnation))

    def wait(self, seconds: float) -> list[Any]:
        """What it does in this time, at its own deadlines."""
        until, found = self.now + seconds, []
        while (due := self.guest.deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            found += self.tell(DeadlineReached())
            if any(isinstance(effect, Exit) for effect in found):
                break
        self.now = until
        return found

    @property
    def code(self) -> int | None:
        return next((e.code for e in self.effects if isinstance(e, Exit)), None)


def asks(effects: list[Any]) -> bool:
    return any(isinstance(e, Send) and isinstance(e.message, m.WantSlot) for e in effects)


def test_after_a_crash_it_asks_again_with_longer_pauses_and_at_last_gives_up():
    machine = Machine()
    for crash in range(CRASHES_MAX):
        machine.die(-11)
        pause_s = min(2.0**crash, 60.0)
        assert not asks(machine.wait(pause_s - 0.01))
        assert asks(machine.wait(1.1))
        machine.spawn()
    machine.die(9)
    assert machine.code == 9


def test_crashes_far_apart_do_not_add_up():
    machine = Machine()
    for _ in range(3 * CRASHES_MAX):
        machine.wait(100.0)
        machine.hear(m.Heard())
        machine.die(1)
        machine.wait(2.1)
        machine.spawn()
    assert machine.code is None


def test_a_worker_that_the_run_has_missed_returns_however_often():
    machine = Machine()
    for _ in range(3 * CRASHES_MAX):
        machine.die(EXIT_FENCED)
        assert asks(machine.wait(2.1))
        machine.spawn()


@pytest.mark.parametrize(("status", "code"), [(0, 0), (EXIT_POISONED, EXIT_POISONED)])
def test_it_leaves_when_its_script_has_ended_or_is_no_use(status: int, code: int):
    machine = Machine()
    machine.die(status)
    machine.wait(GOODBYE_S + 0.1)
    assert machine.code == code
    goodbye = [e.message for e in machine.effects if isinstance(e, Send)][-1]
    assert goodbye == m.ProcessExited("guest-3", 17, 0, ())


@pytest.mark.parametrize(("is_failed", "code"), [(False, 0), (True, 1)])
def test_it_ends_with_the_run(is_failed: bool, code: int):
    machine = Machine()
    machine.die(0)
    machine.hear(m.Shutdown("over", is_failed))
    assert machine.code == code


def test_it_leaves_in_order_and_at_once_if_asked_twice():
    machine = Machine()
    asked = machine.tell(StopRequested("SIGINT"))
    assert [e.message for e in asked if isinstance(e, Send)][-1] == m.Leaving("guest-3")
    assert not [e for e in asked if isinstance(e, SignalProcess)]
    again = machine.tell(StopRequested("SIGINT"))
    assert [e.signal for e in again if isinstance(e, SignalProcess)] == [15]
    killed = machine.wait(6.0)
    assert next(e.signal for e in killed if isinstance(e, SignalProcess)) == 9
    machine.die(-9)
    assert machine.code == 0


def test_it_gives_up_a_run_that_never_answers():
    machine = Machine()
    machine.wait(MISSED_S_MAX - 1.0)
    assert machine.code is None
    machine.wait(10.0)
    machine.die(0)
    assert machine.code == 1


def test_a_guest_speaks_for_itself_and_its_worker_only():
    exits = [m.ProcessExited(name, 1, 0, ()) for name in ("guest-3", "worker-3")]
    assert not any(offence("guest-3", message) for message in exits)
    forbidden = [
        m.ProcessExited("worker-2", 1, 0, ()), m.ProcessExited("agent-1", 1, 0, ()),
        m.Spawned("worker-2", 1, 1), m.Request(1, "stop", {}), m.Failed("guest-3", "", "", True),
        m.Drained("worker-3"), m.WantSlot("guest-2"), m.PortionDone(3, 1, 0, 0, 1, 8, 0.0),
    ]  # fmt: skip
    assert all(offence("guest-3", message) for message in forbidden)
    assert offence("worker-3", m.ProcessExited("worker-3", 1, 0, ()))
