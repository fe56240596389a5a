"""Which checkpoint an ended run goes on from when its job file is started again, and the price."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlctl.cli import console, lineage, values
from dlctl.cli.snapshot import Snapshot
from dlctl.errors import DlctlError, UsageError
from dlctl.runs import checkpoints, manifest
from dlctl.util import hints
from dlctl.util.names import AVERAGE
from dlctl.util.text import plural

if TYPE_CHECKING:
    from dlctl.cli.deciding import Decision
    from dlctl.config import JobFile

Good = tuple[Path, dict[str, Any]]
"""A checkpoint and its manifest."""
LOSSLESS = "nothing is lost with"


def check_fits(run_id: str, good: Good, job: JobFile) -> None:
    """Raises UsageError if another method or rule would have to go on with a checkpoint of this
    run.
    """
    for section in ("algorithm", "optimizer", "inner"):
        before, now = good[1].get(section), getattr(job, section).name
        if isinstance(before, str) and before != now:
            raise UsageError(
                f'{run_id} was trained with the {section} "{before}", not "{now}": '
                "its checkpoint does not fit",
                hint="begin a new run with --fresh",
            )
    if job.average.ema and AVERAGE not in checkpoints.slots(*good):
        raise UsageError(
            f"{run_id} was trained without [average]: its checkpoint has none to go on with",
            hint="remove [average], or begin a new run with --fresh",
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
    if manifest.is_doubtful(decision.checkpoint[1]):
        number = decision.checkpoint[1]["number"]
        told = "its model may be ruined; if it fails again, --fresh begins anew"
        console.warn(f"{lineage.saved_at_failure([number])}: {told}")
    step, steps = values.count(decision.checkpoint[1]["step"]), steps_again(decision)
    again = f", {plural(steps, 'step')} {'is' if steps == 1 else 'are'} done again" if steps else ""
    console.note(f"resumes {name} from step {step}{again}; --fresh starts a new run")


def warn_of_loss(decision: Decision) -> None:
    """What is given up although all of it is kept, and how it would not be."""
    if not decision.could_go_on or not (again := done_again(decision)):
        return
    console.warn(console.escape(f"{why_back(decision)}: {again}; {without_loss(decision)}"))


def why_back(decision: Decision) -> str:
    """Why a run that could go on where it was goes back to a checkpoint."""
    from dlctl.cli import doubtful

    assert decision.previous is not None
    if doubtful.has_failed(decision.previous):
        return doubtful.RUINED
    return "the job file has changed"


def without_loss(decision: Decision) -> str:
    """How nothing would be given up of a run all of which is kept."""
    from dlctl.cli import doubtful

    assert decision.previous is not None
    if doubtful.has_failed(decision.previous):
        return f"it goes on there with: dlctl recover -j {decision.previous.run_id}"
    return f"{LOSSLESS}: {lossless(decision.previous)}"


def steps_again(decision: Decision) -> int:
    """How many steps an ended run has done since the checkpoint that it would go back to."""
    previous, good = decision.previous, decision.checkpoint
    if previous is None or good is None:
        return 0
    seen = values.number(previous.run.get("step")) or 0.0
    reached = int(seen) if decision.findings is None else decision.findings.step
    return max(0, reached - int(good[1]["step"]))


def lost_updates(decision: Decision) -> int:
    """How many updates of all shards are not in the checkpoint, as far as that is known."""
    from dlctl.cli import recovery

    findings = decision.findings
    if findings is None or decision.checkpoint is None:
        return 0
    found = dataclasses.replace(findings, way=recovery.RESUME, checkpoint=decision.checkpoint)
    return sum(updates or 0 for updates in found.lost_updates().values())


def done_again(decision: Decision) -> str:
    """As in "26,160 steps after the checkpoint at step 30,000 are done again", or the updates of
    steps that do not count yet; "" if there are none.
    """
    if decision.checkpoint is None:
        return ""
    what, verb, count = "step", "done again", steps_again(decision)
    if not count:
        what, verb, count = "update", "lost", lost_updates(decision)
    if not count:
        return ""
    saved = values.count(decision.checkpoint[1]["step"])
    counted = f"{plural(count, what)} after the checkpoint at step {saved}"
    return f"{counted} {'is' if count == 1 else 'are'} {verb}"


def lossless(previous: Snapshot) -> str:
    """How a run all of which is kept takes another job file, and loses nothing."""
    from dlctl.cli import nextstep

    name = previous.run_id
    start = f"dlctl start {nextstep.job_file(previous)}"
    return f"dlctl recover -j {name} && dlctl stop -j {name} && {start}"


def _lossless(previous: Snapshot) -> str:
    """The same as a hint."""
    return hints.told(
        lossless(previous),
        "loses nothing: first it goes on with the old job file (dlctl set --list says which keys "
        "change live)",
    )


def all_kept(decision: Decision) -> DlctlError:
    """What to say if a run would have to be given up as a whole to take another job file."""
    from dlctl.cli import nextstep

    previous, findings = decision.previous, decision.findings
    assert previous is not None
    assert findings is not None
    changes = "".join(f"\n  {change.text()}" for change in decision.changes)
    return DlctlError(
        f"the job file has changed, and {previous.run_id} has no checkpoint: all of its "
        f"{findings.done} would be given up, which are kept{changes}",
        where=str(previous.directory),
        hint=hints.either(
            _lossless(previous),
            hints.told(f"dlctl start --fresh {nextstep.job_file(previous)}", "gives them up"),
        ),
    )


def all_damaged(decision: Decision, problems: list[str], file: Path) -> DlctlError:
    """What to say if a run has checkpoints, and none of them is good."""
    from dlctl.cli import nextstep, report

    previous = decision.previous
    assert previous is not None
    kept = _lossless(previous) if decision.could_go_on else ""
    damaged = report.damaged_in_words(len(checkpoints.finished(previous.directory)))
    return DlctlError(
        f"{previous.run_id} cannot go on: {damaged}\n"
        + "\n".join(f"  {problem}" for problem in problems),
        where=str(previous.directory),
        hint=hints.either(
            kept, nextstep.when_all_damaged(previous.run_id, shlex.quote(values.path(file)))
        ),
    )


def cost(decision: Decision, good: Good) -> str:
    """What it costs to go on from there, and why, for the run's events; "" if nothing is lost."""
    from dlctl.cli import recovery

    previous, findings = decision.previous, decision.findings
    assert previous is not None
    if findings is not None and findings.way in (recovery.GO_ON, recovery.RESUME):
        found = dataclasses.replace(findings, way=recovery.RESUME, checkpoint=good)
        return recovery.cost(found, why_back(decision))
    step = values.number(previous.run.get("step")) or 0.0
    again = max(0, int(step) - int(good[1]["step"]))
    if not again:
        return ""
    why = lineage.skipped(previous.directory, good[0]) or "that is the newest one"
    return f"{plural(again, 'step')} {'is' if again == 1 else 'are'} done again, because {why}"
