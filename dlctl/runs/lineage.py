"""Which checkpoints a run descends from, in which order to resume from them, and which count.

After a rollback to an older checkpoint, newer ones do not count any more. Every resume from a
checkpoint is recorded in the events, with all that is needed to decide later which checkpoints and
which terms of its workers precede it.

A checkpoint saved because the run failed may have a ruined model, and a run that resumes from it
would fail and save the same again. So it displaces no other checkpoint, and if the workers' results
were unusable, older ones are tried before it. Checkpoints abandoned for an older one are tried
last.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from dlctl.errors import DlctlError
from dlctl.records.best import Best
from dlctl.records.manifest import FAILURE, Manifest, checkpoint_row, is_suspect
from dlctl.runs import checkpoints, terms
from dlctl.runs.database import RunDb
from dlctl.util import values

Good = tuple[Path, Manifest]
"""A checkpoint and its manifest."""
KIND = "resumed"


@dataclass(frozen=True, slots=True)
class Resume:
    """One resume of a run from a checkpoint."""

    checkpoint: int
    """The number of the checkpoint."""
    highest: int
    """Number of the newest checkpoint at that time, good or not."""
    terms: Mapping[str, int]
    """Worker -> the newest term issued to it by then: this resume ended it."""


def resumes(db: RunDb) -> list[Resume]:
    """Every resume of the run from a checkpoint, the newest last."""
    found = []
    for event in db.events(kind=KIND):
        data = event["data"]
        with suppress(KeyError, TypeError, AttributeError, ValueError, OverflowError):  # Damaged.
            issued = {name: int(term) for name, term in data["terms"].items()}
            found.append(Resume(int(data["checkpoint"]), int(data["highest"]), issued))
    return found


def chain(found: Sequence[Resume]) -> list[Resume]:
    """The resumes of the current branch, the newest first.

    Between two of them the run may have followed another branch, and abandoned it.
    """
    branch: list[Resume] = []
    for resume in reversed(found):
        if not branch or branch[-1].checkpoint > resume.highest:
            branch.append(resume)
    return branch


def is_of_branch(number: int, branch: Sequence[Resume]) -> bool:
    """Whether the current run descends from the checkpoint with this number."""
    newest = math.inf
    for resume in branch:
        if number > resume.highest:
            break
        newest = resume.checkpoint
    return number <= newest


def record(db: RunDb, directory: Path, checkpoint: Path, detail: str, highest: int = 0) -> None:
    """Record that the run resumes; `detail`: the cost and its reason. No commit. highest: a number
    that a checkpoint of an earlier run has where this one writes its own, too.

    From now on this is its newest checkpoint: later ones do not count any more.
    """
    number, step = checkpoints.number(checkpoint)
    rows = {row["number"]: row for row in db.checkpoints()}
    manifest = checkpoints.read_manifest(checkpoint)
    row = {**rows.get(number, {}), **checkpoint_row(checkpoint, manifest)}
    db.put_run(checkpoint=row)
    data = {
        "checkpoint": number,
        "step": step,
        "highest": max([checkpoints.highest_number(directory), highest, *rows]),
        "terms": terms.newest(directory, db),
    }
    text = f"resumed from the checkpoint at step {values.count(step)}"
    db.add_event(time.time(), KIND, "", text + (f": {detail}" if detail else ""), data)


# ---------------------------------------------------------------- the order in which to try them


def order(run_directory: Path) -> list[Path]:
    """All completed checkpoints, damaged ones included, in the order in which to try them."""
    branch, readable = _branch(run_directory), checkpoints.complete(run_directory)

    def rank(path: Path) -> tuple[bool, bool, tuple[int, int]]:
        number = checkpoints.number(path)
        return is_of_branch(number[0], branch), not is_suspect(readable.get(path, {})), number

    return sorted(checkpoints.finished(run_directory), key=rank, reverse=True)


def newest_good(
    run_directory: Path,
    on_problem: Callable[[str], None] = lambda problem: None,
    *,
    hashes: bool = True,
) -> Good | None:
    """The first checkpoint in this order in which every byte is right, or without `hashes`, which
    take long, the first without missing files; None if there is none.

    A completed checkpoint that is not good is skipped and reported to `on_problem`.
    """
    return first_good(order(run_directory), on_problem, hashes=hashes)


def first_good(
    found: Iterable[Path], on_problem: Callable[[str], None], *, hashes: bool = True
) -> Good | None:
    """`newest_good` of these checkpoints in this order."""
    for directory in found:
        problems = checkpoints.verify(directory, hashes=hashes)
        if not problems:
            return directory, checkpoints.read_manifest(directory)
        for problem in problems:
            on_problem(problem)
    return None


def superfluous(
    run_directory: Path,
    branch: Sequence[Resume],
    *,
    keep: int,
    good: Path,
    best: Best | None = None,
) -> list[Path]:
    """Everything older than the checkpoint `good`, except the newest `keep` complete ones and the
    best one: checkpoints, and leftovers of older attempts. A checkpoint being written is newer than
    all complete ones.

    good: known to be good, as every byte was read or has just been written. Checkpoints that do not
    count, because the run abandoned them for an older one or had failed, displace none that counts.
    Removing them was not requested: they stay for as long as if they counted, so there are at most
    twice `keep`.
    """
    found = checkpoints.candidates(run_directory)
    return beyond(checkpoints.complete(run_directory), found, branch, keep, good, best)


def beyond(
    readable: Mapping[Path, Manifest],
    found: Iterable[Path],
    branch: Sequence[Resume],
    keep: int,
    good: Path,
    best: Best | None,
) -> list[Path]:
    """Those of `found` that are superfluous, see there. readable: the complete ones, oldest first;
    only the names of the paths count.
    """
    number = checkpoints.number
    counted = [
        path
        for path, made in readable.items()
        if FAILURE not in made and is_of_branch(number(path)[0], branch)
    ]
    kept = {good, *list(readable)[-keep:], *counted[-keep:]}
    if best is not None:
        kept.add(best.of(readable.items()) or good)
    return [old for old in found if number(old) < number(good) and old not in kept]


def _branch(run_directory: Path) -> list[Resume]:
    """[] if it cannot be read: then checkpoints are tried by their numbers alone."""
    try:
        with closing(RunDb(run_directory, readonly=True)) as db:
            return chain(resumes(db))
    except (DlctlError, OSError, sqlite3.Error, ValueError):
        return []
