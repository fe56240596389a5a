"""The processes that an agent or a guest starts: what is asked of them, and how they end.

A request for a process that has ended, or never ran here, is answered with its exit: the
coordinator's records may be stale.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.protocol.effects import SignalProcess, StartProcess
from dlctl.roles.protocol.limits import STATUS_UNKNOWN
from dlctl.wire import messages as m
from dlctl.wire.machine import Event


@dataclass(frozen=True, slots=True)
class ProcessStarted(Event):
    spawned: m.Spawned


@dataclass(slots=True)
class Child:
    incarnation: int
    pid: int = 0
    exited: m.ProcessExited | None = None
    """How the process ended; None while it is alive."""

    @property
    def alive(self) -> bool:
        return self.exited is None


class HostedProcesses:
    def __init__(self, context: Context, adopted: Iterable[m.Spawned] = ()) -> None:
        """adopted: live daemons that an earlier process has started."""
        self.context = context
        self._children = {a.name: Child(a.incarnation, a.pid) for a in adopted}

    def names(self) -> list[str]:
        return sorted(self._children)

    def living(self) -> list[str]:
        return [name for name, child in self._children.items() if child.alive]

    def unreported(self) -> dict[str, int]:
        """Name -> incarnation of those that are alive, or whose exit is not acknowledged yet."""
        unanswered = self.context.retries
        return {
            name: child.incarnation
            for name, child in self._children.items()
            if child.alive or ("exit", name, child.incarnation) in unanswered
        }

    def signal_all(self, number: int) -> None:
        for name in self.living():
            self.context.do(SignalProcess(name, self._children[name].incarnation, number))

    # ------------------------------------------------------------ requests

    def on_spawn(self, message: m.Spawn, now: float) -> bool:
        """Whether a process is started; otherwise the coordinator is told what has become of it."""
        child = self._children.get(message.name)
        if child is not None and child.incarnation >= message.incarnation:
            if child.exited is not None:
                self.on_ended(child.exited, now)
            elif child.pid:
                self.context.send(
                    COORDINATOR, m.Spawned(message.name, child.incarnation, child.pid)
                )
            return False
        if child is not None and child.alive:
            self.context.do(SignalProcess(message.name, child.incarnation, 9))
        self._children[message.name] = Child(message.incarnation)
        self.context.do(StartProcess(message))
        return True

    def on_kill(self, message: m.Kill, now: float) -> None:
        """Kill a process. Reports an exit even if there is none: else the coordinator would wait
        for it forever.
        """
        name, incarnation = message.name, message.incarnation
        child = self._children.get(name)
        if child is None or (not child.alive and child.incarnation < incarnation):
            self.on_ended(m.ProcessExited(name, incarnation, STATUS_UNKNOWN, ()), now)
        elif child.exited is not None:
            self.on_ended(child.exited, now)
        # A replaced process may still be running, too.
        self.context.do(SignalProcess(name, incarnation, message.signal))

    # ------------------------------------------------------------ what becomes of them

    def on_started(self, spawned: m.Spawned) -> None:
        self._children[spawned.name].pid = spawned.pid
        self.context.send(COORDINATOR, spawned)

    def on_ended(self, exited: m.ProcessExited, now: float) -> None:
        """A process has ended: report that until it is acknowledged."""
        child = self._children.get(exited.name)
        if child is not None and child.incarnation == exited.incarnation:
            child.exited = exited
        key = ("exit", exited.name, exited.incarnation)
        self.context.ask(key, COORDINATOR, exited, now)

    def on_noted(self, message: m.ExitNoted, now: float) -> None:
        self.context.retries.done(("exit", message.name, message.incarnation), now)
