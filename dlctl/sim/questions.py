"""What the computation of a simulated worker asks a worker of another part, and waits for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol, runtime_checkable

from dlctl.roles.protocol.effects import AnswerWanted, BringAnswer
from dlctl.sim.objectives import Batch, Objective
from dlctl.sim.process import Process
from dlctl.wire.messages import Array, Json

Key = tuple[int, int, int]
"""(data epoch, portion, number) of a batch."""
Question = tuple[str, tuple[Array, ...]]
Questions = Generator[Question, tuple[Array, ...], Any]
"""Yields questions, is resumed with their answers, and returns a result."""


@runtime_checkable
class Divided(Protocol):
    """An objective that is divided among the parts of a method."""

    parts: tuple[Objective, ...]


@runtime_checkable
class Asks(Protocol):
    """A part whose computations ask."""

    def asking(self, w: Array, batch: Batch, key: Key) -> Questions:
        """Returns (mean loss, float32[d] its gradient)."""
        ...

    def evaluating(self, w: Array) -> Generator[Question, tuple[Array, ...], Json]: ...


class QuestionsDriver:
    """One computation at a time. The process performs no other one meanwhile."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._run: Questions | None = None
        self._key: Key = (0, 0, 0)
        self._then: Callable[[Any], None] = lambda _: None
        process.perform(BringAnswer, lambda effect: self._resume(effect.arrays))

    def begin(self, run: Questions, key: Key, then: Callable[[Any], None]) -> None:
        """then: called with what `run` returns."""
        assert self._run is None, "one computation at a time"
        self._run, self._key, self._then = run, key, then
        self._resume(None)

    def _resume(self, answer: Any) -> None:
        assert self._run is not None, "nobody has asked"
        try:
            op, arrays = self._run.send(answer)
        except StopIteration as end:
            self._run = None
            self._then(end.value)
            return
        copies = tuple(array.copy() for array in arrays)
        self._process.post(AnswerWanted(op, self._key, copies))
