"""Ctrl-C and its relatives, as an exception at moments when that does no harm."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal came that asks for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


class Interrupts:
    """While this context lasts, signals wait until `arm`; from then on they raise `Interrupted`."""

    def __init__(self) -> None:
        self._armed = False
        self._waiting: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def arm(self) -> None:
        """Raise from now on; at once if a signal has come already."""
        self._armed = True
        if self._waiting is not None:
            raise Interrupted(self._waiting)

    def disarm(self) -> None:
        """What is being done now is short and must not be broken off."""
        self._armed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            raise Interrupted(number)
        self._waiting = number
