"""A run that dies as a whole while it ends, when its servers have exited and removed their shards:
the next coordinator does what is left of the end, and starts nothing that trains.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from training_coordinator import AtWork

from dlctl import registry
from dlctl.records.memory import Memory
from dlctl.roles.coordinator import shutdown
from dlctl.roles.coordinator.coordinator import Coordinator
from dlctl.roles.coordinator.records import HurryMirror
from dlctl.roles.coordinator.supervision.registration import Past
from dlctl.roles.protocol.effects import MirrorNews, OnRecord
from dlctl.roles.protocol.keyring import Keyring
from dlctl.wire import messages as m
from dlctl.wire.machine import DeadlineReached, Effect, Exit, Received, Send, Started

MIRROR = "file:///mount/store"


def died_while_mirroring(state: str, *, saw_exits: bool) -> AtWork:
    """saw_exits: the exits of its servers and workers are on record."""
    run = AtWork(2)
    run.machine.uploads.address = MIRROR
    run.machine.end(state, "as it should", run.now, at_once=True)
    run.machine.handle(OnRecord(), run.now)
    assert run.machine.run.shutdown is not None
    assert run.machine.run.shutdown.step == shutdown.SHUTTING_DOWN
    if saw_exits:
        for daemon in [d for d in run.machine.members.daemons.values() if d.role != "agent"]:
            end = m.ProcessExited(daemon.name, daemon.incarnation, 0, ())
            run.machine.handle(Received(daemon.agent.encode(), end), run.now)
        assert run.machine.run.shutdown.step == shutdown.MIRRORING
    return run


class Next:
    """The next coordinator, of which the agent never comes up: it is not needed for the end."""

    def __init__(self, before: AtWork) -> None:
        known: dict[str, Any] = before.machine.persistence._record.known
        self.memory = json.loads(json.dumps(known))
        job = before.machine.run.job
        method = registry.load("algorithms", job.algorithm.name)
        past = Past(memory=self.memory)
        self.machine = Coordinator("run-1", job, Keyring(b"key"), method, past)
        self.machine.uploads.address = MIRROR
        self.now = 100.0
        self.effects: list[Effect] = self.machine.handle(Started(), self.now)

    def hears(self, *events: Any) -> None:
        for event in events:
            self.effects += self.machine.handle(event, self.now)

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            self.hears(DeadlineReached())


@pytest.mark.parametrize("saw_exits", [True, False])
@pytest.mark.parametrize("state", ["stopped", "finished"])
def test_what_is_left_of_the_end_is_done(state: str, saw_exits: bool) -> None:
    after = Next(died_while_mirroring(state, saw_exits=saw_exits))
    assert Memory(after.memory).only_exits
    after.hears(OnRecord())
    after.wait(15.0)  # Nobody says that those who were alive are not.
    end = after.machine.run.shutdown
    assert end is not None
    assert (end.step, after.machine.run.state) == (shutdown.MIRRORING, "stopping")
    assert any(isinstance(effect, HurryMirror) for effect in after.effects)
    after.hears(MirrorNews({"number": 3, "step": 90, "nbytes": 8}, 0.0, 3, False, (8, 8), "", ""))
    after.wait(15.0)
    assert after.machine.run.state == state
    assert {effect.code for effect in after.effects if isinstance(effect, Exit)} == {0}
    sent = [effect.message for effect in after.effects if isinstance(effect, Send)]
    assert not [message for message in sent if isinstance(message, m.Spawn)]


def test_a_mirror_that_never_answers_does_not_keep_it() -> None:
    after = Next(died_while_mirroring("stopped", saw_exits=True))
    after.hears(OnRecord())
    after.wait(after.machine.run.job.timeouts.mirror_s + 20.0)
    assert after.machine.run.state == "stopped"
    assert any(isinstance(effect, Exit) for effect in after.effects)
