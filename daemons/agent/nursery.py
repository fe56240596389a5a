"""Daemons of one role that wait until the agent's template can fork them."""

from __future__ import annotations

import time
from collections.abc import Callable

from daemons.agent.template import Template
from daemons.loop import Loop
from dlctl.roles.protocol.effects import ProcessEnded, SignalProcess
from dlctl.wire.messages import ProcessExited, Spawn

LATER_S = 5.0
"""From the start of an agent that adopts daemons to that of their template."""


class Nursery:
    def __init__(self, template: Template, loop: Loop, start: Callable[[Spawn], None]) -> None:
        """start: called with each of the daemons, once the template can fork or there is none."""
        self.template = template
        self._loop = loop
        self._start = start
        self._waiting: list[Spawn] = []
        self._watched = -1
        self._begins_at: float | None = None
        template.has_changed = self._release
        loop.chores.append(self._look)
        self._watch()

    def begin_later(self) -> None:
        """Start the template for the replacements of daemons that are there already; not at once,
        as the imports of other processes have to be done first.
        """
        self._begins_at = time.monotonic() + LATER_S

    def takes(self, spawn: Spawn) -> bool:
        """Whether this process waits for the template; otherwise it is to be started now."""
        self.template.begin()
        self._watch()
        if self.template.is_loading:
            self._waiting.append(spawn)
        return self.template.is_loading

    def drop(self, effect: SignalProcess) -> None:
        """A waiting process gets a signal: it ends before it has begun."""
        for spawn in [each for each in self._waiting if each.name == effect.name]:
            if spawn.incarnation == effect.incarnation:
                self._waiting.remove(spawn)
                exited = ProcessExited(spawn.name, spawn.incarnation, -effect.signal, ())
                self._loop.post(ProcessEnded(exited))

    def _release(self) -> None:
        waiting, self._waiting = self._waiting, []
        for spawn in waiting:
            self._start(spawn)

    def _look(self) -> None:
        self.template.look()
        if self._begins_at is not None and time.monotonic() >= self._begins_at:
            self._begins_at = None
            self.template.begin()
        self._watch()

    def _watch(self) -> None:
        """Watch the template that there is now."""
        if self._watched != self.template.fd:
            if self._watched >= 0:
                self._loop.unwatch(self._watched)
            self._watched = self.template.fd
            if self._watched >= 0:
                self._loop.watch(self._watched, self._look)
