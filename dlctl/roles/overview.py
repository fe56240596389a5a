"""What `status` shows: the coordinator's state as rows, twice a second and at changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlctl.roles import ending
from dlctl.roles.journal import Snapshot

if TYPE_CHECKING:
    from dlctl.roles.coordinator import Coordinator

REPORT_S = 0.5
RATE_S = 2.0
"""The time that rates are measured over."""


class Overview:
    def __init__(self, coordinator: Coordinator) -> None:
        self.of = coordinator
        self.due_at = 0.0
        self._rates_at: float | None = None
        self._before = (0, 0)
        self._per_s = (0.0, 0.0)

    def report_if_due(self, now: float) -> None:
        if self.due_at <= now:
            self.report(now)

    def report(self, now: float) -> None:
        self.due_at = now + REPORT_S
        self._measure(now)
        of, work, checkpointing = self.of, self.of.work, self.of.checkpointing
        over = of.ending is not None and of.ending.step == ending.OVER
        run = {
            "state": of.state,
            "reason": of.reason,
            "step": work.steps,
            "samples": work.samples,
            "steps_per_s": round(self._per_s[0], 2),
            "samples_per_s": round(self._per_s[1], 2),
            "data_epoch": round(work.epochs_done(), 4),
            "progress": work.progress(),
            "loss": work.loss,
            "evaluation": of.evaluations.newest,
            "ready_at": work.released_at,
            "updated_at": now,
            "ended_at": now if over else None,
            "waiting": self.waiting(),
            "checkpoint_error": checkpointing.last_error,
            "settings": {d.name: d.settings for d in of.members.daemons.values() if d.settings},
        }
        if checkpointing.newest is not None:
            run["checkpoint"] = checkpointing.newest
        rows = tuple(d.to_json() for d in of.members.daemons.values())
        of.desk.do(Snapshot(run, rows))

    def waiting(self) -> str:
        """Whom the run waits for now, and for what; "" if for nobody."""
        end = self.of.ending
        if end is not None:
            pending = end.pending()
            return f"{end.step}: {', '.join(pending)}" if pending else ""
        return self.unready() if self.of.state == "starting" else self.of.work.held_back()

    def unready(self) -> str:
        """The daemons that the others wait for before all are at work, and what they are doing."""
        late = [d for d in self.of.members.daemons.values() if d.state in ("starting", "backoff")]
        causes = [d for d in late if not d.waiting_for] or late
        return ", ".join(f"{d.name} ({d.phase or d.state})" for d in causes)

    def _measure(self, now: float) -> None:
        if self._rates_at is not None and now - self._rates_at < RATE_S:
            return
        done = (self.of.work.steps, self.of.work.samples)
        if self._rates_at is not None:
            elapsed_s = now - self._rates_at
            steps, samples = (a - b for a, b in zip(done, self._before, strict=True))
            self._per_s = (steps / elapsed_s, samples / elapsed_s)
        self._rates_at, self._before = now, done
