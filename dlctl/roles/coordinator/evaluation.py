"""Evaluations: one worker at a time runs the task's `evaluate` on what the servers have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dlctl import messages as m
from dlctl.messages import Json
from dlctl.roles.coordinator.membership import Daemon, Membership
from dlctl.roles.coordinator.records import History
from dlctl.roles.coordinator.target import Target
from dlctl.roles.protocol.limits import EVALUATE_S_MAX


@dataclass(frozen=True, slots=True)
class Asked:
    """An evaluation under way."""

    worker: str
    number: int
    step: int
    """When it was begun: what is evaluated is hardly newer."""
    is_last: bool
    """Nothing is trained any more."""


class Evaluations:
    def __init__(
        self,
        context: History,
        members: Membership,
        steps_done: Callable[[], int],
        target: Target | None = None,
    ) -> None:
        """target: of the job; it ends the run."""
        self.context = context
        self.target = target
        self.out_of_reach = ""
        """Why the target cannot be reached, as far as evaluations have shown it."""
        self.members = members
        self.steps_done = steps_done
        self.newest: Json | None = None
        """Metrics of the last one, and the step it was made at."""
        self.number = 0
        self.asked: Asked | None = None
        self.has_last = False
        """There is an answer about what the servers have at the end of the run."""
        self._begun = 0.0
        """Since then the worker evaluates, or hangs before it does, or is silent."""

    @property
    def worker(self) -> str:
        """Who evaluates now; "" if nobody does."""
        return self.asked.worker if self.asked is not None else ""

    def begin(self, now: float, *, is_last: bool = False) -> None:
        """Ask the first worker that is well, unless an evaluation is under way."""
        able = self._able()
        if able and self.asked is None:
            self.number += 1
            worker = min(able, key=_seems_to_hang)
            self._ask(Asked(worker.name, self.number, self.steps_done(), is_last), now)

    def go_on(self, asked: Asked, now: float) -> None:
        """Another coordinator has begun this one, and nobody knows how far it is."""
        worker = self.members.get(asked.worker)
        if worker is not None and worker.alive:
            self._ask(asked, now)

    def _able(self) -> list[Daemon]:
        return [d for d in self.members.of_role("worker") if _can_evaluate(d)]

    def pass_over(self) -> None:
        """Wait no longer for a worker that hangs in its batch, if another one is well."""
        hangs = self.asked is not None and self.members.daemons[self.worker].hangs
        if hangs and not all(_seems_to_hang(d) for d in self._able()):
            self.gone(self.worker)

    def _ask(self, asked: Asked, now: float) -> None:
        self.asked = asked
        self._begun = now
        self.context.ask("evaluate", asked.worker, m.Evaluate(asked.number), now)

    def on_report(self, daemon: Daemon, now: float) -> None:
        """Who is at work meanwhile waits for the model: a slow link may need longer for it than the
        evaluation may take.
        """
        if daemon.name == self.worker and not (daemon.stuck or daemon.evaluates):
            self._begun = now

    def overdue(self, now: float) -> bool:
        """Whether the worker has taken so long that nothing will come of it."""
        return self.asked is not None and now >= self._begun + EVALUATE_S_MAX

    def on_evaluated(self, message: m.Evaluated, now: float) -> tuple[int, Json] | None:
        """Of the answer that is waited for: its step, and the metrics that are finite."""
        asked = self.asked
        if asked is None or (message.name, message.evaluation) != (asked.worker, asked.number):
            return None
        self.context.retries.done("evaluate", now)
        self.asked = None
        self.has_last = asked.is_last
        step = asked.step
        numbers = {k: v for k, v in message.metrics.items() if isinstance(v, int | float)}
        metrics = {k: v for k, v in numbers.items() if math.isfinite(v)}
        if odd := ", ".join(sorted(f"{key:.80}" for key in numbers.keys() - metrics.keys())):
            self.context.event("evaluation", message.name, f"step {step}: not finite: {odd}")
        if metrics:
            self.newest = metrics | {"step": step}
        return step, metrics

    def gone(self, name: str) -> None:
        if name == self.worker:
            self.context.retries.drop("evaluate")
            self.asked = None


def _can_evaluate(worker: Daemon) -> bool:
    is_lost = worker.out_of_touch or worker.killed_for
    return worker.alive and worker.asked_for_data and not is_lost


def _seems_to_hang(worker: Daemon) -> bool:
    """It says so, or has not left its batch when it was to drain."""
    return worker.stuck or (worker.state == "draining" and not worker.drained)
