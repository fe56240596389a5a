"""Weights & Biases, through its own package: one run in the project of the job.

wandb counts steps of its own, which never go back. They are the numbers of the rows; the steps of
the run are the metric "step", the x axis of all others. An evaluation is of an earlier step than
the newest row, and a run may be rolled back.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from daemons.tracker.client import settings
from daemons.tracker.notes import TrackerNotes
from dlctl.job.config import JobFile

DEFAULTS = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
"""Of the package's variables, where the user has not set them."""
AXIS = "step"


class WandbRun:
    holds_s = 20.0
    """Its service writes every 15 s."""

    def __init__(self, directory: Path, job: JobFile, notes: TrackerNotes) -> None:
        """Raises what the package raises, and OSError."""
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        import wandb

        if "id" not in notes.run:
            notes.name(id=secrets.token_hex(6))
        self._notes = notes
        own = {"console": "off", "silent": True, "x_disable_stats": True, "disable_git": True}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or job.job.name,
            id=notes.run["id"],
            name=directory.name,
            resume="allow",
            mode="online" if job.log.wandb == "online" else "offline",
            dir=str(directory),
            settings=wandb.Settings(**own),
        )
        self._run.config.update(settings(job), allow_val_change=True)
        self._run.define_metric(AXIS, hidden=True)
        self._run.define_metric("*", step_metric=AXIS)

    def log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for number, row in enumerate(rows, self._notes.rows - len(rows)):
            self._run.log({AXIS: row["step"], **row["values"]}, step=number, commit=True)

    def end(self, outcome: str) -> None:
        self._run.summary["outcome"] = outcome
        self._run.finish(exit_code=1 if outcome == "failed" else 0)

    def leave(self) -> None:
        """Written as preempted: another process resumes it."""
        self._run.mark_preempting()
        self._run.finish(exit_code=1)
