"""Reports a batch that takes too long: for how long, and in which line of the task.

The worker's process is alive and its loop answers, so no other process can detect the hang. A batch
that only takes longer than usual is reported, too, before it counts as hung: else no report would
explain the lack of steps.
"""

from __future__ import annotations

from typing import Any

from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.effects import LocateTask, TaskLocated
from dlctl.roles.protocol.limits import EVALUATE_S_MAX
from dlctl.roles.worker.interface import ReplicaAtWork
from dlctl.roles.worker.services.engines import RUNNING, STEPPING
from dlctl.util.text import bounded_place


class StallDetector:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._asked = False
        """`LocateTask` was requested for the current batch, which is done once."""
        self._place = ""

    def located(self, event: TaskLocated) -> bool:
        """Whether the place belongs to the current slow batch."""
        if self._asked:
            self._place = bounded_place(event.place)
        return self._asked

    def look(self, replica: ReplicaAtWork, phase: str, now: float) -> tuple[dict[str, Any], str]:
        """(what to add to the metrics, the phase to report)."""
        stuck_s = replica.stuck_s(now)
        if not stuck_s:
            self._asked, self._place = False, ""
            long_s = replica.long_s(now)
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
