"""Which checkpoints a run descends from, which are gone on from first, and which of them count.

Where a run has gone back to an older checkpoint, newer ones count for nothing any more. Every time
it resumes from one, that goes into its events, with all that is needed to tell later which
checkpoints, and which epochs of its workers, were of before.

What a run saves because it has failed may be of a model that is ruined, and whoever tries to go on
with that makes it save the same again. So it takes the place of no other one, and if nobody could
use what its workers computed, older ones are tried before it. Those that the run has left, for an
older one, are tried last.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError
from dlctl.runs import checkpoints
from dlctl.runs.database import RunDb
from dlctl.runs.manifest import FAILURE, Manifest, checkpoint_row, is_doubtful
from dlctl.util import values

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


def resumes(db: RunDb) -> list[Resume]:
    """Every time that the run went on from a checkpoint, the newest one last."""
    data = ((event["data"], str(event["text"])) for event in db.events(kind=KIND))
    found = [_resume(*event) for event in data if isinstance(event[0], Mapping)]
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


def record(db: RunDb, directory: Path, checkpoint: Path, told: str) -> None:
    """Put on record that the run resumes; `told`: what that costs, and why. No commit.

    From now on its newest checkpoint is that one: what came after it counts no more.
    """
    number, step = checkpoints.number(checkpoint)
    rows = {row["number"]: row for row in db.checkpoints()}
    manifest = checkpoints.read_manifest(checkpoint)
    row = {**rows.get(number, {}), **checkpoint_row(checkpoint, manifest)}
    db.put_run(checkpoint=row)
    data = {
        "checkpoint": number,
        "step": step,
        "highest": max([checkpoints.highest_number(directory), *rows]),
        "terms": db.terms(),
    }
    text = f"{RESUMED}checkpoint at step {values.count(step)}"
    db.add_event(time.time(), KIND, "", text + (f"{COST}{told}" if told else ""), data)


def skipped(directory: Path, checkpoint: Path) -> str:
    """As in "checkpoint 16 is damaged": why newer ones than `checkpoint` were passed over; "" if
    there are none, or for reasons of their owner's.
    """
    newest, told = checkpoints.number(checkpoint), []
    for path in checkpoints.finished(directory):
        number = checkpoints.number(path)
        if number > newest:
            if is_doubtful(_manifest(path)):
                told.append(f"checkpoint {number[0]} was saved when the run failed")
            elif checkpoints.verify(path):
                told.append(damaged([number[0]]))
    return "; ".join(told)


def damaged(numbers: Iterable[int]) -> str:
    return "; ".join(f"checkpoint {number} is damaged" for number in numbers)


# ---------------------------------------------------------------- the order in which to try them


def order(run_directory: Path) -> list[Path]:
    """All that were completed once, damaged ones included, in the order in which to try them."""
    branch = _branch(run_directory)

    def rank(directory: Path) -> tuple[bool, bool, tuple[int, int]]:
        number = checkpoints.number(directory)
        is_left = not is_of_branch(number[0], branch)
        return not is_left, not is_doubtful(_manifest(directory)), number

    return sorted(checkpoints.finished(run_directory), key=rank, reverse=True)


def counting(run_directory: Path, branch: Sequence[Resume]) -> Callable[[int], bool]:
    """Which numbers count among those that `checkpoints.superfluous` keeps."""
    found = checkpoints.complete(run_directory)
    failed = {checkpoints.number(path)[0] for path, made in found.items() if FAILURE in made}
    return lambda number: number not in failed and is_of_branch(number, branch)


def _branch(run_directory: Path) -> list[Resume]:
    """[] if nobody can tell: then they are tried by their numbers alone."""
    try:
        with closing(RunDb(run_directory, readonly=True)) as db:
            return chain(resumes(db))
    except (DlctlError, OSError, sqlite3.Error, ValueError):
        return []


def _manifest(directory: Path) -> Manifest:
    with suppress(DlctlError):
        return checkpoints.read_manifest(directory)
    return {}
