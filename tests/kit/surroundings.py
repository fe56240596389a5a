"""What a test shares with those that run after it in its process, and has to leave as it was."""

from __future__ import annotations

import os
import signal
from typing import NamedTuple

OF_OTHERS = ("PYTEST_", "TORCHINDUCTOR_CACHE_DIR", "ACCELERATE_")
"""Beginnings of variables that no test sets: torch does, when a test imports torch._dynamo, and
accelerate, when one makes a Trainer.
"""
SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)
"""Those that the project, or a test, sets."""


class Surroundings(NamedTuple):
    environment: dict[bytes, bytes]
    ignored: frozenset[int]
    """Signals."""
    blocked: frozenset[int]

    @classmethod
    def now(cls) -> Surroundings:
        """Of this process and thread."""
        ignored = (number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return cls(dict(os.environb), frozenset(ignored), frozenset(blocked))

    def left_changed(self, now: Surroundings) -> list[str]:
        """What differs, and how; [] where nothing does."""
        found = []
        for name in sorted(self.environment.keys() | now.environment.keys()):
            was, is_now = self.environment.get(name), now.environment.get(name)
            if was != is_now and not os.fsdecode(name).startswith(OF_OTHERS):
                of = f"the variable {os.fsdecode(name)}"
                found.append(f"{of} was {_shown(was)}, and is {_shown(is_now)}")
        for what, before, after in (
            ("ignored", self.ignored, now.ignored), ("blocked", self.blocked, now.blocked)
        ):  # fmt: skip
            for number in sorted(before ^ after):
                change = "is now" if number in after else "is no longer"
                found.append(f"{signal.Signals(number).name} {change} {what}")
        return found

    def restore(self, now: Surroundings) -> None:
        """For the tests that follow."""
        for name in now.environment.keys() - self.environment.keys():
            if not os.fsdecode(name).startswith(OF_OTHERS):
                del os.environb[name]
        for name, value in self.environment.items():
            if not os.fsdecode(name).startswith(OF_OTHERS):
                os.environb[name] = value
        for number in self.ignored - now.ignored:
            signal.signal(number, signal.SIG_IGN)
        for number in now.ignored - self.ignored:
            is_int = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_int else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)


def _shown(value: bytes | None) -> str:
    return "not set" if value is None else repr(os.fsdecode(value))
