"""What is leased to the user's loop, between the thread that is told of it and the user's."""

from __future__ import annotations

from queue import Empty, SimpleQueue

from dlctl.roles.protocol.loop_effects import GiveData
from dlctl.roles.worker.stock import Stock


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

    def now(self) -> Stock:
        """The stock with all that was given. In the user's thread."""
        while not self._given.empty():
            self._receive(self._given.get())
        return self._stock

    def wait(self, timeout_s: float) -> bool:
        """Block until something was given since the last look, or `wake`; False: nothing came. In
        the user's thread.
        """
        try:
            self._receive(self._given.get(timeout=timeout_s))
        except Empty:
            return False
        return True

    def _receive(self, effect: GiveData | None) -> None:
        if effect is not None:
            self._stock.give(effect)
