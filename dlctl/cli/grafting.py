"""A new run that begins with a checkpoint of another one: the way on for a run whose database is
lost, and for a model that is to be trained on in another directory.

Of the other run nothing is needed or changed but this checkpoint. What is in it of pushes is kept,
so that `dlctl verify` can tell them from those of the new run: none of the epochs and generations
that it knows of is given out again.
"""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlctl import checkpoints
from dlctl.cli import console, lineage, values
from dlctl.errors import DlctlError, UsageError
from dlctl.manifest import MANIFEST, Manifest
from dlctl.rundb import RunDb

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


def put(directory: Path, good: Good) -> None:
    """Have the new run in `directory`, which has not begun, begin with it. Raises DlctlError,
    OSError or sqlite3.Error.
    """
    source, manifest = good
    copy = checkpoints.create(directory, manifest["step"], manifest["number"])
    for part in (*manifest["shards"], *manifest["workers"]):
        with (source / part["file"]).open("rb") as old, (copy / part["file"]).open("xb") as new:
            shutil.copyfileobj(old, new)
            new.flush()
            os.fsync(new.fileno())
    checkpoints.write_manifest(copy, manifest)
    with closing(RunDb(directory)) as db:
        db.put_run(resume=str(copy))
        db.put_terms(_terms(manifest))
        lineage.record(db, directory, copy, "")
        db.commit()


def tell(good: Good) -> None:
    step, run_id = values.count(good[1]["step"]), console.escape(str(good[1]["run_id"]))
    console.note(f"a new run begins with the checkpoint of {run_id} at step {step}")


def _terms(manifest: Manifest) -> dict[str, int]:
    """The newest epochs and generations that the checkpoint knows of."""
    terms: dict[str, int] = {}
    for shard in manifest["shards"]:
        state: dict[str, Any] = shard["state"]
        terms[shard["name"]] = int(state.get("generation", 0))
        for slot, epoch, *_ in state.get("deliveries", []):
            terms[f"worker-{slot}"] = max(epoch, terms.get(f"worker-{slot}", 0))
    return terms
