"""Evaluations: one worker at a time runs the task's `evaluate` on what the servers have; and at the
end of a run that has finished one runs the task's `finish`, if it has one.

Who dies while it runs `finish` is followed by one other, if there is one. It has so long as
`evaluation.finish_s` says, and what it raises or does not come to changes nothing about the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from dlctl import messages as m
from dlctl.messages import Json
from dlctl.roles.coordinator.membership import Daemon, Membership
from dlctl.roles.coordinator.records import History
from dlctl.roles.protocol.limits import EVALUATE_S_MAX
from dlctl.runs.best import Best, Target, what_there_is

FINISHES_MAX = 2
"""Workers that are asked to run `finish`: it may be what they die of."""


@dataclass(frozen=True, slots=True)
class Asked:
    """An evaluation under way."""

    worker: str
    number: int
    step: int
    """When it was begun: what is evaluated is hardly newer."""
    is_last: bool
    """Nothing is trained any more."""
    finishes: bool = False
    """It is the task's `finish` that is run."""


@dataclass(eq=False)
class Evaluations:
    context: History
    members: Membership
    steps_done: Callable[[], int]
    target: Target | None = None
    """Of the job; it ends the run."""
    finish_s: float = 60.0
    """That `finish` may take."""
    best: Best | None = None
    """What is to be saved at once."""
    of_average: bool = False
    """What is looked at is the servers' moving average."""
    best_value: float | None = field(default=None, init=False)
    """The best so far, as this coordinator knows."""
    is_to_save: bool = field(default=False, init=False)
    """That one is in no checkpoint yet."""
    _told_of_best: bool = field(default=False, init=False)
    out_of_reach: str = field(default="", init=False)
    """Why the target cannot be reached, as far as evaluations have shown it."""
    newest: Json | None = field(default=None, init=False)
    """Metrics of the last one, and the step it was made at."""
    asked: Asked | None = field(default=None, init=False)
    has_last: bool = field(default=False, init=False)
    """There is an answer about what the servers have at the end of the run."""
    _begun: float = field(default=0.0, init=False)
    """Since then the worker evaluates, or hangs before it does, or is silent."""
    _evaluated_by: str = field(default="", init=False)
    has_finish: bool = field(default=False, init=False)
    """Whether the task has a `finish`."""
    finishes: int = field(default=0, init=False)
    """How often somebody has been asked to run it."""
    finished: Json | None = field(default=None, init=False)
    """{"worker", "text", "error"}: what has come of it."""

    @property
    def worker(self) -> str:
        """Who evaluates now; "" if nobody does."""
        return self.asked.worker if self.asked is not None else ""

    def begin(self, now: float, *, is_last: bool = False) -> None:
        """Ask the first worker that is well, unless an evaluation is under way."""
        able = self._able()
        if able and self.asked is None:
            worker = min(able, key=_seems_to_hang)
            self._ask(
                Asked(worker.name, self.context.next_number(), self.steps_done(), is_last), now
            )

    def finish(self, now: float) -> None:
        """Have the task's `finish` run, unless it has been, or is: by who evaluated last, if it is
        well, else by another worker.
        """
        able = self._able()
        if not able or self.asked is not None or self.finished or self.finishes >= FINISHES_MAX:
            return
        self.finishes += 1
        worker = min(able, key=lambda d: (_seems_to_hang(d), d.name != self._evaluated_by))
        number = self.context.next_number()
        self._ask(Asked(worker.name, number, self.steps_done(), is_last=True, finishes=True), now)

    def finish_until(self) -> float:
        """When who runs it is given up."""
        return self._begun + self.finish_s

    def end_finish(self) -> None:
        """Whatever it has not come to, it will not any more."""
        if self.finished:
            return
        why = "no worker is there that could run it"
        if self.asked is not None:
            why = f"not done after {self.finish_s:g} s (finish_s of [evaluation])"
        elif self.finishes:
            why = "who ran it has died"
        self.finished = {"worker": self.worker, "text": "", "error": why}
        self.context.event("late", self.worker, f"the task's finish: {why}")
        self.gone(self.worker)

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
        newest = self.newest or {} if asked.finishes else {}
        metrics = {name: value for name, value in newest.items() if name != "step"}
        message = m.Evaluate(asked.number, asked.finishes, metrics, self.of_average)
        self.context.ask("evaluate", asked.worker, message, now)

    def on_report(self, daemon: Daemon, now: float) -> None:
        """Who is at work meanwhile waits for the model: a slow link may need longer for it than the
        evaluation may take. (What runs `finish` has one limit for both.)
        """
        asked = self.asked
        if asked is None or asked.worker != daemon.name or asked.finishes:
            return
        if not (daemon.stuck or daemon.evaluates):
            self._begun = now

    def overdue(self, now: float) -> bool:
        """Whether the worker has taken so long that nothing will come of it."""
        asked = self.asked
        return asked is not None and not asked.finishes and now >= self._begun + EVALUATE_S_MAX

    def on_evaluated(self, message: m.Evaluated, now: float) -> tuple[int, Json] | None:
        """Of the answer that is waited for: its step, and the metrics that are finite."""
        asked = self.asked
        if asked is None or (message.name, message.evaluation) != (asked.worker, asked.number):
            return None
        self.context.retries.done("evaluate", now)
        self.asked = None
        if asked.finishes:
            self._on_finished(message)
            return None
        self.has_last, self._evaluated_by = asked.is_last, message.name
        step = asked.step
        numbers = {k: v for k, v in message.metrics.items() if isinstance(v, int | float)}
        metrics = {k: v for k, v in numbers.items() if math.isfinite(v)}
        if odd := ", ".join(sorted(f"{key:.80}" for key in numbers.keys() - metrics.keys())):
            self.context.event("evaluation", message.name, f"step {step}: not finite: {odd}")
        if metrics:
            self.newest = metrics | {"step": step}
        if self.best is not None and not message.error:
            self._look_for_the_best(self.best, metrics, message)
        return step, metrics

    def _look_for_the_best(self, best: Best, metrics: Json, message: m.Evaluated) -> None:
        value = best.value(metrics)
        if value is not None and best.is_better(value, self.best_value):
            self.best_value, self.is_to_save = value, True
        elif best.metric not in message.metrics and not self._told_of_best:
            self._told_of_best = True
            why = what_there_is(best.metric, message.metrics)
            text = f'best = "{best}" of [checkpoints] keeps no checkpoint: {why}'
            self.context.event("target", message.name, text)

    def _on_finished(self, message: m.Evaluated) -> None:
        self.finished = {"worker": message.name, "text": message.text, "error": message.error}
        why = f"the task's finish has failed: {message.error}"
        text = why if message.error else "the task's finish is done"
        self.context.event("finish", message.name, text)

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
