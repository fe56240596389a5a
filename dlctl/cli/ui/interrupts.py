"""Ctrl-C and similar signals, raised as an exception at safe moments only."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A termination signal was received."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


class Interrupts:
    """Signals are queued. Within `armed`, one is delivered: it raises `Interrupted`. The next one
    is queued again, so that it does not interrupt the handling of the first.
    """

    def __init__(self) -> None:
        self._armed = False
        self._waiting: list[int] = []

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Raise at the next signal; at once if one is queued."""
        self._armed = True
        try:
            self.handle()
            yield
        finally:
            self._armed = False

    def handle(self, *signals: Any) -> None:
        """The handler of a signal: its number, and the frame."""
        self._waiting += signals[:1]
        if self._armed and self._waiting:
            self._armed = False
            raise Interrupted(self._waiting.pop(0))


@contextmanager
def caught() -> Iterator[Interrupts]:
    """Within this context, signals go to the `Interrupts`. An ignored SIGHUP stays ignored: nohup
    sets that so that the process survives its terminal.
    """
    interrupts = Interrupts()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        if (number, before[number]) != (signal.SIGHUP, signal.SIG_IGN):
            signal.signal(number, interrupts.handle)
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
