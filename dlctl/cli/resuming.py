"""Which checkpoint an ended run goes on from when its job file is started again, and the price."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlctl import checkpoints
from dlctl.cli import console, lineage, values
from dlctl.cli.snapshot import Snapshot
from dlctl.errors import DlctlError, UsageError
from dlctl.text import plural

if TYPE_CHECKING:
    from dlctl.cli.deciding import Decision
    from dlctl.cli.recovery import Findings
    from dlctl.config import JobFile

Good = tuple[Path, dict[str, Any]]
"""A checkpoint and its manifest."""


def check_fits(previous: Snapshot, good: Good, job: JobFile) -> None:
    """Raises UsageError if another method or rule would have to go on with a checkpoint."""
    for section, now in (("algorithm", job.algorithm.name), ("optimizer", job.optimizer.name)):
        before = good[1][section]
        if isinstance(before, str) and before != now:
            raise UsageError(
                f'{previous.run_id} was trained with the {section} "{before}", not "{now}": '
                "its checkpoint does not fit",
                hint="begin a new run with --fresh",
            )


def tell(decision: Decision) -> None:
    """From where an ended run goes on, or that it cannot."""
    previous = decision.previous
    assert previous is not None
    name = console.escape(previous.run_id)
    for problem in decision.damaged:
        console.warn(problem)
    if decision.checkpoint is None:
        console.note(f"{name} ({previous.state}) has no checkpoint to go on from; a new run begins")
        return
    step = values.count(decision.checkpoint[1]["step"])
    console.note(f"resumes {name} from step {step}; --fresh starts a new run")


def all_damaged(previous: Snapshot, problems: list[str], file: Path) -> DlctlError:
    """What to say if a run has checkpoints, and none of them is good."""
    count = len(checkpoints.finished(previous.directory))
    which = "its only checkpoint is" if count == 1 else f"all of its {count} checkpoints are"
    return DlctlError(
        f"{previous.run_id} cannot go on: {which} damaged\n"
        + "\n".join(f"  {problem}" for problem in problems),
        where=str(previous.directory),
        hint=f"dlctl checkpoint verify -j {previous.run_id}   |   a new run: dlctl start --fresh "
        f"{values.path(file)}",
    )


def cost(previous: Snapshot, findings: Findings | None, good: Good) -> str:
    """What it costs to go on from there, and why, for the run's events; "" if nothing is lost.

    `findings`: of a run that has failed.
    """
    from dlctl.cli import recovery

    if findings is not None and findings.way in (recovery.GO_ON, recovery.RESUME):
        found = dataclasses.replace(findings, way=recovery.RESUME, checkpoint=good)
        return recovery.cost(found, "the job file has changed")
    step = values.number(previous.run.get("step")) or 0.0
    again = max(0, int(step) - int(good[1]["step"]))
    if not again:
        return ""
    why = lineage.skipped(previous.directory, good[0]) or "that is the newest one"
    return f"{plural(again, 'step')} {'is' if again == 1 else 'are'} done again, because {why}"
