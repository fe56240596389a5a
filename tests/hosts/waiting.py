"""Waiting for what happens elsewhere, with an end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


def until(what: str, condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """The first true value of `condition`. Raises AssertionError if there is none in time."""
    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not in {timeout_s:g} s: {what}"
        pause.wait(0.02)
    return found
