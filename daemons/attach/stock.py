"""What is leased to the user's loop, between the thread that is told of it and the user's."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol

from dlctl.roles.protocol.loop_effects import GiveData
from dlctl.roles.worker.stock import Stock


class LoopStock(Protocol):
    """The stock as the user's thread sees it."""

    def now(self, samples: int = 0) -> Stock:
        """The stock with what was given; samples: of the batch that is to be taken."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Block until something was given, or there is another reason to look around; False:
        nothing came.
        """
        ...


class SharedStock:
    """One thread gives; the user's thread alone uses the stock, so that needs no lock."""

    def __init__(self, *, cuts: bool = False) -> None:
        """cuts: see `Stock`."""
        self._stock = Stock(cuts=cuts)
        self._given: SimpleQueue[GiveData | None] = SimpleQueue()

    def give(self, effect: GiveData) -> None:
        """Data, or that there is none. From any thread."""
        self._given.put(effect)

    def wake(self) -> None:
        """Let the user's thread look around, if it waits. From any thread."""
        self._given.put(None)

    def now(self, samples: int = 0) -> Stock:
        """The stock with all that was given. In the user's thread."""
        self._receive(self.given())
        return self._stock

    def wait(self, timeout_s: float) -> bool:
        """Block until something was given since the last look, or `wake`; False: nothing came. In
        the user's thread.
        """
        given = self.given(timeout_s)
        self._receive(given)
        return bool(given)

    def given(self, timeout_s: float = 0.0) -> list[GiveData | None]:
        """Take what was given since the last look, for another stock; block until there is some."""
        given: list[GiveData | None] = []
        with suppress(Empty):
            if timeout_s:
                given.append(self._given.get(timeout=timeout_s))
            while True:
                given.append(self._given.get_nowait())
        return given

    def _receive(self, given: list[GiveData | None]) -> None:
        for effect in given:
            if effect is not None:
                self._stock.give(effect)
