"""Evaluations: one worker at a time runs the task's `evaluate` on what the servers have."""

from __future__ import annotations

import math

from dlctl import messages as m
from dlctl.messages import Json
from dlctl.roles.journal import History
from dlctl.roles.membership import Membership

EVALUATE_S_MAX = 600.0


class Evaluations:
    def __init__(self, desk: History, members: Membership) -> None:
        self.desk = desk
        self.members = members
        self.newest: Json | None = None
        """Metrics of the last one, and the step it was made at."""
        self.worker = ""
        """Who evaluates now; "" if nobody does."""
        self.number = 0
        self._begun = 0.0

    def begin(self, now: float) -> None:
        """Ask the first worker that lives, unless an evaluation is under way."""
        able = [d.name for d in self.members.of("worker") if d.alive and d.asked_for_data]
        if able and not self.worker:
            self.number += 1
            self.worker = able[0]
            self._begun = now
            self.desk.ask("evaluate", self.worker, m.Evaluate(self.number), now)

    def overdue(self, now: float) -> bool:
        """Whether the worker has taken so long that nothing will come of it."""
        return bool(self.worker) and now >= self._begun + EVALUATE_S_MAX

    def on_evaluated(self, message: m.Evaluated, step: int, now: float) -> Json | None:
        """The metrics that are finite, if this is the answer that is waited for."""
        if not self.worker or (message.name, message.evaluation) != (self.worker, self.number):
            return None
        self.desk.outstanding.done("evaluate", now)
        self.worker = ""
        numbers = {k: v for k, v in message.metrics.items() if isinstance(v, int | float)}
        metrics = {k: v for k, v in numbers.items() if math.isfinite(v)}
        if odd := ", ".join(sorted(f"{key:.80}" for key in numbers.keys() - metrics.keys())):
            self.desk.event("evaluation", message.name, f"step {step}: not finite: {odd}")
        if metrics:
            self.newest = metrics | {"step": step}
        return metrics

    def gone(self, name: str) -> None:
        if name == self.worker:
            self.desk.outstanding.drop("evaluate")
            self.worker = ""
