"""Evaluations: one worker at a time runs the task's `evaluate` on the servers' parameters. At the
end of a finished run one worker runs the task's `finish`, if it has one.

If the worker dies while it runs `finish`, one other worker is asked. `finish` may take
`evaluation.finish_s` seconds; an error or a timeout in it does not change the state of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field

from dlctl.records.best import Best, Target, available_metrics
from dlctl.records.evaluated import Result
from dlctl.records.memory import Entry, EvaluationMemory, Fields, Finish, Memory, Work
from dlctl.roles.coordinator.members.membership import Daemon, Membership
from dlctl.roles.coordinator.records import EventContext, Owner
from dlctl.roles.protocol.limits import EVALUATE_S_MAX
from dlctl.util import values
from dlctl.wire import messages as m
from dlctl.wire.messages import Json

FINISHES_MAX = 2
"""Workers that are asked to run `finish`: `finish` itself may kill a worker."""


@dataclass(frozen=True, slots=True)
class Asked:
    """An evaluation in progress."""

    worker: str
    number: int
    step: int
    """The run's step when the evaluation began: the evaluated parameters are hardly newer."""
    is_last: bool
    """Training has ended."""
    finishes: bool = False
    """The worker runs the task's `finish` instead of its `evaluate`."""


@dataclass(eq=False)
class Evaluations(Owner):
    PERSISTED = frozenset({"newest", "asked", "has_finish", "finishes", "finished"})
    context: EventContext
    members: Membership
    steps_done: Callable[[], int]
    target: Target | None = None
    """The job's target, which ends the run."""
    finish_s: float = 60.0
    """Time limit of `finish`."""
    best: Best | None = None
    """The metric whose best value is saved at once."""
    of_average: bool = False
    """Evaluate the servers' moving average."""
    without: frozenset[int] = frozenset()
    """The slots of workers that cannot evaluate: they have no data."""
    best_value: float | None = field(default=None, init=False)
    """The best value that this coordinator has seen."""
    is_to_save: bool = field(default=False, init=False)
    """The best model is in no checkpoint yet."""
    _reported_no_best: bool = field(default=False, init=False)
    out_of_reach: str = field(default="", init=False)
    """Why the target cannot be reached, according to the evaluations so far."""
    newest: Result | None = field(default=None, init=False)
    """The result of the newest evaluation that has metrics."""
    asked: Asked | None = field(default=None, init=False)
    has_last: bool = field(default=False, init=False)
    """The final parameters have been evaluated."""
    _begun: float = field(default=0.0, init=False)
    """Since when the worker has been evaluating, hanging before it starts, or stale."""
    _evaluated_by: str = field(default="", init=False)
    has_finish: bool = field(default=False, init=False)
    """Whether the task has a `finish`."""
    finishes: int = field(default=0, init=False)
    """How many workers have been asked to run `finish`."""
    finished: Json | None = field(default=None, init=False)
    """The result of the task's `finish`: {"worker", "text", "error"}."""

    def memory(self) -> Iterator[Entry | Fields]:
        newest, asked = self.newest, self.asked
        yield Fields(Work, {"evaluation": None if newest is None else newest.to_json()})
        yield Fields(EvaluationMemory, {"asked": None if asked is None else list(astuple(asked))})
        finish = Finish(self.finishes, self.finished) if self.has_finish else None
        yield Entry(Finish.KEY, finish)

    def recall(self, memory: Memory, now: float) -> None:
        """All but the evaluation that is in progress (`interrupted`)."""
        newest = memory.work.evaluation
        self.newest = None if newest is None else Result.from_json(newest)
        if finish := memory.piece(Finish):
            self.has_finish = True
            self.finishes, self.finished = finish.started, finish.result

    @staticmethod
    def interrupted(memory: Memory) -> Asked | None:
        """The evaluation that an earlier coordinator has begun, for `resume`."""
        was = memory.piece(EvaluationMemory)
        return Asked(*was.asked) if was and was.asked else None

    @property
    def worker(self) -> str:
        """The worker that evaluates now; "" if none does."""
        return self.asked.worker if self.asked is not None else ""

    def begin(self, now: float, *, is_last: bool = False, finishes: bool = False) -> None:
        """Ask the worker that evaluated last, or the first one, if it is healthy, else another one;
        unless an evaluation is in progress.
        """
        able = self._able()
        if able and self.asked is None:
            worker = min(able, key=lambda d: (_seems_to_hang(d), d.name != self._evaluated_by))
            number = self.context.next_number()
            self._ask(Asked(worker.name, number, self.steps_done(), is_last, finishes), now)

    def finish(self, now: float) -> None:
        """Run the task's `finish`, unless it has run or is running."""
        if self.asked is None and not self.finished and self.finishes < FINISHES_MAX:
            self.begin(now, is_last=True, finishes=True)
            self.finishes += self.asked is not None

    def finish_until(self) -> float:
        """Deadline of the running `finish`."""
        return self._begun + self.finish_s

    def end_finish(self, because: str = "") -> None:
        """Give up on a `finish` that has not returned."""
        if self.finished:
            return
        if because:
            why = because
        elif self.asked is not None:
            why = f"not done after {self.finish_s:g} s (finish_s of [evaluation])"
        else:
            died = "the worker that ran it has died"
            why = died if self.finishes else "no worker was able to run it"
        self.finished = {"worker": self.worker, "text": "", "error": why}
        self.context.event("late", self.worker, f"the task's finish: {why}")
        self.gone(self.worker)

    def resume(self, asked: Asked, now: float) -> None:
        """Resume an evaluation that an earlier coordinator has begun; its progress is unknown."""
        worker = self.members.get(asked.worker)
        if worker is not None and worker.alive:
            self._ask(asked, now)

    def _able(self) -> list[Daemon]:
        workers = (d for d in self.members.of_role("worker") if d.alive and d.asked_for_data)
        able = (d for d in workers if d.index not in self.without)
        return [d for d in able if not (d.out_of_touch or d.killed_for or d.error)]

    def pass_over(self) -> None:
        """Stop waiting for a worker that hangs in its batch, if another one is healthy."""
        hangs = self.asked is not None and self.members.daemons[self.worker].hangs
        if hangs and not all(_seems_to_hang(d) for d in self._able()):
            self.gone(self.worker)

    def _ask(self, asked: Asked, now: float) -> None:
        self.asked = asked
        self._begun = now
        metrics = dict(self.newest.metrics) if self.newest and asked.finishes else {}
        message = m.Evaluate(asked.number, asked.finishes, metrics, self.of_average)
        self.context.ask("evaluate", asked.worker, message, now)

    def on_report(self, daemon: Daemon, now: float) -> None:
        """A worker that does not evaluate yet is fetching the model: on a slow link that may take
        longer than an evaluation may, so it does not count. (`finish` has one limit for both.)
        """
        asked = self.asked
        if asked is None or asked.worker != daemon.name or asked.finishes:
            return
        if not (daemon.stuck or daemon.evaluates):
            self._begun = now

    def overdue(self, now: float) -> bool:
        asked = self.asked
        return asked is not None and not asked.finishes and now >= self._begun + EVALUATE_S_MAX

    def on_evaluated(self, message: m.Evaluated, now: float) -> Result | None:
        """The step and the finite values of the expected answer; None for any other answer."""
        asked = self.asked
        if asked is None or (message.name, message.evaluation) != (asked.worker, asked.number):
            return None
        self.context.retries.done("evaluate", now)
        self.asked = None
        if asked.finishes:
            self._on_finished(message)
            return None
        self.has_last, self._evaluated_by = asked.is_last, message.name
        metrics = _finite(message.metrics)
        found = Result(asked.step, metrics, _finite(message.method))
        if odd := [values.name(f"{key:.80}") for key in sorted(message.metrics.keys() - metrics)]:
            text = f"step {found.step}: not finite: {', '.join(odd)}"
            self.context.event("evaluation", message.name, text)
        if metrics:
            self.newest = found
        if self.best is not None and not message.error:
            self._update_best(self.best, metrics, message)
        return found

    def _update_best(self, best: Best, metrics: Json, message: m.Evaluated) -> None:
        value = best.value(metrics)
        if value is not None and best.is_better(value, self.best_value):
            self.best_value, self.is_to_save = value, True
        elif best.metric not in message.metrics and not self._reported_no_best:
            self._reported_no_best = True
            why = available_metrics(best.metric, message.metrics)
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


def _seems_to_hang(worker: Daemon) -> bool:
    """Whether a worker reports that it hangs, or was asked to drain and has not left its batch."""
    return worker.stuck or (worker.state == "draining" and not worker.drained)


def _finite(metrics: Json) -> dict[str, float]:
    numbers = {name: float(v) for name, v in metrics.items() if isinstance(v, int | float)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
