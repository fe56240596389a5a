"""What all checkers have in common: what they see, and how they say that a promise is broken."""

from __future__ import annotations

from dlctl.machine import Effect, Peer
from dlctl.messages import Message
from dlctl.sim.process import Process
from dlctl.sim.world import World


class PromiseBroken(AssertionError):
    """A checker has seen what must never be; `checker` is the name of its class."""

    def __init__(self, checker: str, what: str) -> None:
        super().__init__(f"{checker}: {what}")
        self.checker = checker


class Checker:
    """Sees every effect before it is performed and every message before it is handled."""

    def at_start(self, world: World) -> None:
        """The world in which the run is going to be."""

    def on_effect(self, process: Process, effect: Effect) -> None:
        pass

    def on_message(self, process: Process, peer: Peer, message: Message) -> None:
        pass

    def at_end(self, world: World) -> None:
        """The run has ended by itself, and what was left of it has had time to go."""

    def broken(self, what: str) -> PromiseBroken:
        return PromiseBroken(type(self).__name__, what)
