"""Ctrl-C and its relatives, as an exception at moments when that does no harm."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_READ_BYTES = 64


class Interrupted(BaseException):
    """A signal came that asks for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


class Interrupts:
    """While this context lasts, a signal waits until `arm`, which lets one through.

    Each signal raises `Interrupted` once: at `arm` if it has come before, else when it comes. After
    that the next one waits again, so that what handles the first is not broken off by a second.

    Python runs a handler once for all signals that came during one call into C (a slow disk, a
    locked database). The interpreter writes a byte per signal into a pipe, and these are counted:
    two Ctrl-C are two. Only what the kernel merges is one: a signal that comes again before the
    process has run at all since the first.
    """

    def __init__(self) -> None:
        self._armed = False
        self._waiting: list[int] = []
        """Signals that nobody has been told of."""
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._pipe = (-1, -1)

    def __enter__(self) -> Interrupts:
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in SIGNALS:
            # Whoever starts us with nohup wants to close the terminal and have it go on.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
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
        signal.set_wakeup_fd(self._wakeup_before)
        for descriptor in self._pipe:
            os.close(descriptor)

    def arm(self) -> None:
        """Raise at the next signal; at once if one waits already."""
        self._armed = True
        self._raise_one()

    def disarm(self) -> None:
        """What is being done now is short and must not be broken off."""
        self._armed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count()
        if self._armed:
            self._raise_one()

    def _count(self) -> None:
        try:
            came = os.read(self._pipe[0], _READ_BYTES)
        except BlockingIOError:
            return
        self._waiting += [number for number in came if number in SIGNALS]

    def _raise_one(self) -> None:
        if self._waiting:
            self._armed = False
            raise Interrupted(self._waiting.pop(0))
