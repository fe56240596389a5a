"""A new run from a checkpoint: one of another run, or of the last run of its job, resumed with
another method or optimiser.

The checkpoint is copied into the new run. No term recorded in it is ever reissued.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from dlctl.errors import UsageError
from dlctl.ops import cases, checkpoint_choice, downloads, translation
from dlctl.ops.translation import Translation
from dlctl.records import manifest
from dlctl.records.manifest import MANIFEST
from dlctl.runs import checkpoints
from dlctl.stores import addresses
from dlctl.util import regular

if TYPE_CHECKING:
    from dlctl.job.config import JobFile
    from dlctl.runs.lineage import Good


@contextmanager
def taken(source: str, job: JobFile, parent: Path) -> Iterator[Good]:
    """`check` of a directory, or of what is at an address: the checkpoint that it names, or the
    newest good one there. It is downloaded into `parent`, and removed when the block ends. Raises
    DlctlError as `check`.
    """
    if not addresses.is_like(source):
        yield check(Path(source), job)
        return
    with downloads.downloaded(source, parent) as path:
        yield check(path, job)


def check(source: Path, job: JobFile) -> Good:
    """A checkpoint that a new run of this job can start from; reads every byte of it.

    Raises UsageError if it is none, or does not fit the job; DlctlError if it is damaged.
    """
    if not os.path.lexists(source / MANIFEST):
        raise UsageError(
            f'"{source}" is not a checkpoint directory: it has no {MANIFEST}',
            hint="dlctl checkpoint ls -q",
        )
    good = source.absolute(), checkpoint_choice.checked(source)
    cases.check_fits(str(good[1]["run_id"]), good, job)
    return good


def copy(directory: Path, good: Good, job: JobFile, *, is_ours: bool = False) -> Path:
    """A complete copy of it in the directory of a run being created, translated if the job has
    another method or optimiser. is_ours: it is a download, whose files are moved. Raises
    DlctlError or OSError.
    """
    source, saved = good
    made = checkpoints.create(directory, saved["step"], saved["number"])
    if (translated := _translated(good, job)) is not None:
        written = {}
        for new_part in translated.parts:
            sha256, nbytes = checkpoints.write_arrays(made / new_part.file, new_part.arrays())
            written[new_part.file] = {"sha256": sha256, "nbytes": nbytes}
        checkpoints.share_frozen(source, made, translated.manifest)
        checkpoints.write_manifest(made, translated.completed(written))
        return made
    for part in filter(itemgetter("file"), manifest.parts(saved)):
        if is_ours:
            (source / part["file"]).rename(made / part["file"])
            continue
        with regular.opened(source / part["file"]) as old, (made / part["file"]).open("xb") as new:
            shutil.copyfileobj(old, new)
            new.flush()
            os.fsync(new.fileno())
    checkpoints.write_manifest(made, saved)
    return made


def terms(checkpoint: Path) -> dict[str, int]:
    """The newest terms recorded in it. Raises DlctlError."""
    from dlctl.ops import verify  # imported late: it pulls in numpy

    terms: dict[str, int] = {}
    for shard in checkpoints.read_manifest(checkpoint)["shards"]:
        state = shard["state"]
        term = state.get("generation")
        terms[shard["name"]] = term if type(term) is int else 0
        for slot, term in verify.table_of(state.get("deliveries")):
            terms[f"worker-{slot}"] = max(term, terms.get(f"worker-{slot}", 0))
    return terms


def in_words(good: Good, job: JobFile) -> str:
    """What is kept with another method or optimiser, and what starts over; "" if they are equal."""
    translated = _translated(good, job)
    if translated is None:
        return ""
    kept = ["model", "progress", *([translated.keeps] if translated.keeps else [])]
    afresh = f"; starts over: {', '.join(translated.afresh)}" if translated.afresh else ""
    return f"{manifest.otherwise(good[1], job)}; keeps: {', '.join(kept)}{afresh}"


def _translated(good: Good, job: JobFile) -> Translation | None:
    """The translation of a checkpoint for a job; None: the job resumes from it unchanged. Raises
    UsageError or DlctlError.
    """
    if not manifest.otherwise(good[1], job):
        return None
    source = translation.Source(
        good[1],
        partial(checkpoints.read_slice, *good),
        partial(checkpoints.read_averaged, *good),
        partial(checkpoints.read_worker, *good),
    )
    return translation.translated(source, job)
