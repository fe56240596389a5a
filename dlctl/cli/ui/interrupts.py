"""Ctrl-C and its relatives, as an exception at moments when that does no harm."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal came that asks for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


class Interrupts:
    """Signals wait until `arm`, which lets one through: it raises `Interrupted` there, or when it
    comes. The next one waits again, so that it does not break off what handles the first.
    """

    def __init__(self) -> None:
        self._armed = False
        self._waiting: list[int] = []

    def arm(self) -> None:
        """Raise at the next signal; at once if one waits already."""
        self._armed = True
        self._raise_one()

    def disarm(self) -> None:
        """What is being done now is short and must not be broken off."""
        self._armed = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        self._waiting.append(number)
        if self._armed:
            self._raise_one()

    def _raise_one(self) -> None:
        if self._waiting:
            self._armed = False
            raise Interrupted(self._waiting.pop(0))


@contextmanager
def caught() -> Iterator[Interrupts]:
    """While this context lasts, signals go to the `Interrupts`. Whoever starts us with nohup wants
    to close the terminal and have it go on.
    """
    interrupts = Interrupts()
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = [n for n in SIGNALS if not (ignored and n == signal.SIGHUP)]
    before = {number: signal.signal(number, interrupts.handle) for number in numbers}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
