"""How often a host is asked whether its files have grown."""

from __future__ import annotations

from collections import Counter

from dlctl.roles.coordinator.members.membership import Membership
from dlctl.roles.coordinator.remote_files import LOOK_S, LogMirror
from dlctl.roles.protocol.context import Context
from dlctl.wire import messages as m
from dlctl.wire.machine import Send

MINUTE_S = 60.0


class Host:
    """One worker on another host, whose agent answers at once."""

    def __init__(self) -> None:
        self.context = Context(1.0)
        self.members = Membership(["agent-1"], {"worker-0": "agent-1"}, before={})
        for daemon in self.members.daemons.values():
            daemon.begin(0.0)
            daemon.restore_state("running")
            daemon.registered = True
        self.mirror = LogMirror(self.context, self.members, {})
        self.mirror.follow(self.members.daemons["worker-0"])
        self.asked: Counter[str] = Counter()
        self.grows = False

    def advance(self, begin_s: float, seconds: float) -> None:
        now = begin_s
        while now < begin_s + seconds:
            self.mirror.on_deadline(now)
            for effect in self.context.clear():
                if isinstance(effect, Send) and isinstance(effect.message, m.ReadFile):
                    self._answer(effect.message, now)
            now += LOOK_S

    def _answer(self, asked: m.ReadFile, now: float) -> None:
        self.asked[asked.file] += 1
        data = b"x" * (8 if self.grows else 0)
        size = asked.offset + len(data)
        answer = m.FileData("agent-1", asked.request, asked.file, 1, asked.offset, size, data, "")
        self.mirror.on_data(answer, now)


def test_a_host_is_asked_at_intervals_and_at_once_only_while_more_is_there() -> None:
    host = Host()
    host.advance(0.0, MINUTE_S)
    assert set(host.asked.values()) == {MINUTE_S / LOOK_S}
    host.asked.clear()
    host.grows = True
    host.advance(MINUTE_S, MINUTE_S)
    assert set(host.asked.values()) == {MINUTE_S / LOOK_S}


def test_the_last_lines_of_a_process_that_has_ended_are_fetched_at_once() -> None:
    host = Host()
    host.advance(0.0, MINUTE_S)
    host.asked.clear()
    host.members.daemons["worker-0"].ended(m.ProcessExited("worker-0", 1, -9, ()), MINUTE_S)
    host.advance(MINUTE_S, 2 * LOOK_S)
    assert set(host.asked.values()) == {1}
    assert host.mirror.pending() == []
