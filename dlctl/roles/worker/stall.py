"""What a worker says of a batch that takes too long: for how long, and in which line of the task.

Its process lives and its loop answers, so that nobody else can tell. A batch that only takes longer
than usual is told of, too, before it counts as one that hangs: else nothing would say why no steps
are made.
"""

from __future__ import annotations

from typing import Any

from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.effects import LocateTask, TaskLocated
from dlctl.roles.protocol.limits import EVALUATE_S_MAX
from dlctl.roles.worker.services.computing import RUNNING, STEPPING
from dlctl.roles.worker.training import Training
from dlctl.util.text import bounded_place


class StallDetector:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._asked = False
        """For where the present one is: that is looked for once, and is in the log, too."""
        self._place = ""

    def located(self, event: TaskLocated) -> bool:
        """Whether that is news of the batch that takes so long."""
        if self._asked:
            self._place = bounded_place(event.place)
        return self._asked

    def look(self, training: Training, phase: str, now: float) -> tuple[dict[str, Any], str]:
        """(what to add to the metrics, the phase to report)."""
        stuck_s = training.stuck_s(now)
        if not stuck_s:
            self._asked, self._place = False, ""
            long_s = training.computing.long_s(now)
            return ({"in_batch_s": round(long_s, 1)} if long_s else {}), phase
        if not self._asked:
            self._asked = True
            self._context.do(LocateTask())
        evaluates = phase == "evaluating"
        kinds = {"evaluating": "evaluation", RUNNING: "operation of its engine", STEPPING: "step"}
        what = kinds.get(phase, "batch")
        metrics: dict[str, Any] = {"stuck_s": round(stuck_s, 1)}
        metrics["hangs"] = not evaluates or stuck_s > EVALUATE_S_MAX
        if self._place:
            metrics["stuck_at"] = self._place
        return metrics, f"in one {what} for {stuck_s:.0f} s"
