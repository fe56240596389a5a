"""What is told of the checkpoints that a run has gone on from, and put on record for later; see
`dlctl/runs/branches.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from dlctl.runs import branches, checkpoints
from dlctl.runs.branches import COST, KIND, RESUMED, Resume
from dlctl.runs.database import RunDb
from dlctl.runs.manifest import is_doubtful
from dlctl.runs.snapshot import Snapshot, checkpoint_row
from dlctl.util import values


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
    there are none, or for reasons of their owner's. They have been read, so damage is noted.
    """
    newest = checkpoints.number(checkpoint)
    newer = [d for d in checkpoints.finished(directory) if checkpoints.number(d) > newest]
    bad = [path for path in newer if checkpoints.verify(path, hashes=False)]
    doubtful = [
        path for path in newer if path not in bad and is_doubtful(checkpoints.read_manifest(path))
    ]
    parts = [damaged([checkpoints.number(path)[0] for path in bad])]
    parts += [saved_at_failure([checkpoints.number(path)[0] for path in doubtful])]
    return ", and ".join(filter(None, parts))


def damaged(numbers: Sequence[int]) -> str:
    """As in "checkpoints 16 and 17 are damaged"; "" if there are none."""
    return _of_checkpoints(numbers, "is damaged", "are damaged")


def saved_at_failure(numbers: Sequence[int]) -> str:
    """As in "checkpoint 17 was saved when the run failed"; "" if there are none."""
    when = "saved when the run failed"
    return _of_checkpoints(numbers, f"was {when}", f"were {when}")


def _of_checkpoints(numbers: Sequence[int], one: str, many: str) -> str:
    if len(numbers) < 2:
        return f"checkpoint {numbers[0]} {one}" if numbers else ""
    return f"checkpoints {', '.join(map(str, numbers[:-1]))} and {numbers[-1]} {many}"


def resumes(snapshot: Snapshot) -> list[Resume]:
    """Every time that the run went on from a checkpoint, the newest one last."""
    with closing(RunDb(snapshot.directory, readonly=True)) as db:
        return branches.resumes(db)


def of_branch(snapshot: Snapshot, branch: Sequence[Resume]) -> list[Path]:
    """Checkpoints that were completed once, on the way that the run has come, newest last."""
    found = checkpoints.finished(snapshot.directory)
    return [path for path in found if branches.is_of_branch(checkpoints.number(path)[0], branch)]
