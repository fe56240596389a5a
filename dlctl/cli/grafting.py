"""A new run that begins with a checkpoint of another one: the way on for a run whose database is
lost, and for a model that is to be trained on in another directory.

Of the other run nothing is needed or changed but this checkpoint. What is in it of pushes is kept,
so that `dlctl verify` can tell them from those of the new run: none of the epochs and generations
that it knows of is given out again.
"""

from __future__ import annotations

import os
import shutil
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from dlctl.cli import console, lineage, values
from dlctl.errors import DlctlError, UsageError
from dlctl.runs import checkpoints
from dlctl.runs.database import RunDb
from dlctl.runs.manifest import MANIFEST, Manifest, is_doubtful, parts

if TYPE_CHECKING:
    from dlctl.cli.resuming import Good
    from dlctl.config import JobFile


def check(source: Path, job: JobFile) -> Good:
    """A checkpoint that a new run of this job can begin with, every byte of which is read.

    Raises UsageError if it is none, or was made by another method or rule; DlctlError if it is
    damaged.
    """
    from dlctl.cli import resuming

    if not (source / MANIFEST).is_file():
        raise UsageError(
            f'"{source}" is no checkpoint directory: it has no {MANIFEST}',
            hint="dlctl checkpoint ls -q",
        )
    if problems := checkpoints.verify(source):
        told = "".join(f"\n  {problem}" for problem in problems)
        raise DlctlError(f"this checkpoint is damaged{told}", where=str(source))
    good = source.absolute(), checkpoints.read_manifest(source)
    resuming.check_fits(str(good[1]["run_id"]), good, job)
    return good


def copy(directory: Path, good: Good) -> Path:
    """A complete copy of it in the directory of a run that is being made. Raises DlctlError or
    OSError.
    """
    source, manifest = good
    made = checkpoints.create(directory, manifest["step"], manifest["number"])
    for part in filter(itemgetter("file"), parts(manifest)):
        with _opened(source / part["file"]) as old, (made / part["file"]).open("xb") as new:
            shutil.copyfileobj(old, new)
            new.flush()
            os.fsync(new.fileno())
    checkpoints.write_manifest(made, manifest)
    return made


def _opened(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise DlctlError(
            f"cannot read the checkpoint: {error.strerror}",
            where=str(file),
            hint="dlctl checkpoint ls -q",
        ) from error


def record(db: RunDb, directory: Path, copy: Path) -> None:
    """Have a run that is being made begin with it. No commit. Raises DlctlError, sqlite3.Error."""
    db.put_terms(_terms(checkpoints.read_manifest(copy)))
    lineage.record(db, directory, copy, "")


def tell(good: Good) -> None:
    if is_doubtful(good[1]):
        told = lineage.saved_at_failure([good[1]["number"]])
        console.warn(f"{told}: its model may be ruined")
    step, run_id = values.count(good[1]["step"]), console.escape(str(good[1]["run_id"]))
    console.note(f"a new run begins with the checkpoint of {run_id} at step {step}")


def _terms(manifest: Manifest) -> dict[str, int]:
    """The newest epochs and generations that the checkpoint knows of."""
    from dlctl.cli import verdicts  # only here: it takes numpy along

    terms: dict[str, int] = {}
    for shard in manifest["shards"]:
        state = shard["state"]
        generation = state.get("generation")
        terms[shard["name"]] = generation if type(generation) is int else 0
        for slot, epoch in verdicts.table_of(state.get("deliveries")):
            terms[f"worker-{slot}"] = max(epoch, terms.get(f"worker-{slot}", 0))
    return terms
