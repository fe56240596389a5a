"""Answers of a method that take needs of their own: one generator at a time, beside the method's
`run`, and after that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

from dlctl.algorithms.needs import Gradient, Need, NextData
from dlctl.roles.worker.services.base import Service
from dlctl.wire.messages import Array

Serves = Generator[Need, Any, tuple[Array, ...]]


class AnswerRunner:
    def __init__(self, services: Mapping[type[Need], Service[Any]]) -> None:
        self._services = services
        self._run: Serves | None = None
        self._need: Need | None = None
        self._then: Callable[[tuple[Array, ...]], None] = lambda _: None

    @property
    def is_busy(self) -> bool:
        return self._run is not None

    def begin(self, run: Serves, then: Callable[[tuple[Array, ...]], None], now: float) -> None:
        """then: called with what `run` returns."""
        assert self._run is None, "one answer at a time"
        self._run, self._then = run, then
        self._resume(None, now)

    def advance(self, now: float) -> None:
        """Go on for as long as nothing has to be waited for."""
        while self._run is not None and self._need is not None:
            done, value = self._services[type(self._need)].poll(now)
            if not done:
                return
            self._resume(value, now)

    def deadline(self) -> float | None:
        return self._services[type(self._need)].deadline() if self._need is not None else None

    def _resume(self, value: Any, now: float) -> None:
        """Raises TypeError for a need that nothing serves here."""
        assert self._run is not None
        try:
            need = self._run.send(value)
        except StopIteration as end:
            self._run = self._need = None
            self._then(end.value)
            return
        if type(need) not in self._services or isinstance(need, Gradient | NextData):
            raise TypeError(f"an answer yields {need!r:.80}, which nothing serves")
        self._need = need
        self._services[type(need)].begin(need, now)
