"""The base of all checkers: what they observe, and how they report a violated invariant."""

from __future__ import annotations

from dlctl.sim.process import Process
from dlctl.sim.world import World
from dlctl.wire.machine import Effect, Peer
from dlctl.wire.messages import Message


class PromiseBroken(AssertionError):
    """A checker has found a violation; `checker` is the name of its class."""

    def __init__(self, checker: str, what: str) -> None:
        super().__init__(f"{checker}: {what}")
        self.checker = checker


class Checker:
    """Observes every effect before it is performed and every message before it is handled."""

    def at_start(self, world: World) -> None:
        """The world of the run, before its start."""

    def on_effect(self, process: Process, effect: Effect) -> None:
        pass

    def on_message(self, process: Process, peer: Peer, message: Message) -> None:
        pass

    def at_end(self, world: World) -> None:
        """The run has ended on its own, and its remaining processes have had time to exit."""

    def broken(self, what: str) -> PromiseBroken:
        return PromiseBroken(type(self).__name__, what)
