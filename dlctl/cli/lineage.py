"""Which checkpoints a run descends from: where it went back to an older one, newer ones count for
nothing any more.

Every time a run resumes from a checkpoint, that goes into its events, with all that is needed to
tell later which checkpoints, and which epochs of its workers, were of before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlctl import checkpoints
from dlctl.cli import values
from dlctl.cli.snapshot import Snapshot
from dlctl.rundb import RunDb

KIND = "resumed"
RESUMED, COST = "resumed from the ", ": "
"""How the text of such an event begins; before what it costs to resume, if that is anything."""


@dataclass(frozen=True, slots=True)
class Resume:
    """One time that a run went on from a checkpoint."""

    checkpoint: int
    """Its number."""
    highest: int
    """Number of the newest checkpoint that there was then, good or not."""
    terms: Mapping[str, int]
    """Worker -> the newest epoch that it had been given by then."""
    told: str = ""
    """As in "checkpoint at step 30: 60 steps are done again, because ..."; "" if none were."""

    def is_after(self, worker: str, epoch: int) -> bool:
        """Whether this epoch of a worker had begun by then; so it has also ended then."""
        newest = self.terms.get(worker)
        return newest is not None and epoch <= newest


def record(db: RunDb, directory: Path, checkpoint: Path, told: str) -> None:
    """Put into the run's events that it resumes; `told`: what that costs, and why. No commit."""
    number, step = checkpoints.number(checkpoint)
    known = [row["number"] for row in db.checkpoints()]
    data = {
        "checkpoint": number,
        "step": step,
        "highest": max([checkpoints.highest_number(directory), *known]),
        "terms": db.terms(),
    }
    text = f"{RESUMED}checkpoint at step {values.count(step)}"
    db.add_event(time.time(), KIND, "", text + (f"{COST}{told}" if told else ""), data)


def skipped(directory: Path, checkpoint: Path) -> str:
    """As in "checkpoint 16 is damaged": those that were passed over for `checkpoint`; "" if none.

    The newest good one is taken, so whatever is newer is not good.
    """
    newest = checkpoints.number(checkpoint)
    newer = [checkpoints.number(found) for found in checkpoints.finished(directory)]
    return damaged([number for number, step in newer if (number, step) > newest])


def damaged(numbers: Sequence[int]) -> str:
    """As in "checkpoints 16 and 17 are damaged"; "" if there are none."""
    if not numbers:
        return ""
    if len(numbers) == 1:
        return f"checkpoint {numbers[0]} is damaged"
    return f"checkpoints {', '.join(map(str, numbers[:-1]))} and {numbers[-1]} are damaged"


def resumes(snapshot: Snapshot) -> list[Resume]:
    """Every time that the run went on from a checkpoint, the newest one last."""
    with closing(RunDb(snapshot.directory, readonly=True)) as db:
        events = [event for event in db.events() if event["kind"] == KIND]
    found = [_resume(e["data"], str(e["text"])) for e in events if isinstance(e["data"], Mapping)]
    return [resume for resume in found if resume is not None]


def _resume(data: Mapping[str, Any], text: str) -> Resume | None:
    """None for what another version may have written."""
    number, highest, terms = (data.get(key) for key in ("checkpoint", "highest", "terms"))
    if type(number) is not int or type(highest) is not int or not isinstance(terms, Mapping):
        return None
    told = text.removeprefix(RESUMED) if COST in text else ""
    return Resume(number, highest, {k: v for k, v in terms.items() if type(v) is int}, told)


def chain(found: Sequence[Resume]) -> list[Resume]:
    """Those of the present branch, the newest one first.

    Between two of them the run may have gone another way, and come back from it.
    """
    branch: list[Resume] = []
    for resume in reversed(found):
        if not branch or branch[-1].checkpoint > resume.highest:
            branch.append(resume)
    return branch


def is_of_branch(number: int, branch: Sequence[Resume]) -> bool:
    """Whether the checkpoint with this number is one that the present run descends from."""
    newest = math.inf
    for resume in branch:
        if number > resume.highest:
            break
        newest = resume.checkpoint
    return number <= newest


def of_branch(snapshot: Snapshot, branch: Sequence[Resume]) -> list[Path]:
    """Checkpoints that were completed once, on the way that the run has come, newest last."""
    found = checkpoints.finished(snapshot.directory)
    return [path for path in found if is_of_branch(checkpoints.number(path)[0], branch)]
