"""What a command says while it waits for the coordinator: for whom, and until when."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from dlctl.cli import console, values

DRAINING = "draining"
"""The phase that the grace is for."""


def _given_up_in(progress: Mapping[str, Any]) -> str:
    """When a checkpoint does without those that it waits for; "" if that is not known."""
    left_s = values.number(progress.get("left_s"))
    return "" if left_s is None else f"; it does without in {left_s:.0f}s"


class Countdown:
    """Says for whom a command waits, whenever that changes, and how long a stop waits for the
    workers; nothing of that if they are killed.
    """

    def __init__(self, grace_s: float | None) -> None:
        self.until = None if grace_s is None else time.monotonic() + grace_s
        self.told: tuple[str, tuple[str, ...]] | None = None

    def __call__(self, progress: Mapping[str, Any]) -> None:
        """Take one progress report of the verb "stop": {"phase": text, "waiting": names}."""
        phase = str(progress.get("phase", ""))
        waiting = tuple(map(str, progress.get("waiting") or ()))
        if not waiting or (phase, waiting) == self.told:
            return
        self.told = phase, waiting
        left = _given_up_in(progress)
        if self.until is not None and phase == DRAINING and not left:
            left = f", {max(0.0, self.until - time.monotonic()):.0f}s left"
        console.note(console.escape(f"{phase or 'stopping'}: {', '.join(waiting)}{left}"))
