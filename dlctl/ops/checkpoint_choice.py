"""Selecting the checkpoints a command refers to, and reporting damaged ones."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from dlctl.errors import DlctlError, NotFound, UsageError
from dlctl.records import manifest
from dlctl.records.best import Best
from dlctl.records.manifest import Manifest
from dlctl.runs import checkpoints, lineage, select
from dlctl.runs.snapshot import Snapshot, read_job
from dlctl.util import notes


def chosen(text: str, job: str | None) -> Path:
    """A checkpoint by its path, its number within the run, its step, "latest" (the newest good one)
    or "best" (`checkpoints.best`). If several have that step, the newest of them.

    Raises NotFound if there is no such checkpoint, UsageError if `text` is none of these, and
    DlctlError if the best one is damaged.
    """
    if os.path.lexists(Path(text) / manifest.MANIFEST):
        return Path(text).absolute()
    snapshot = select.load_any(select.directory(job))
    if text == "latest":
        if (good := lineage.newest_good(snapshot.directory, notes.warn)) is None:
            raise _missing(snapshot, "no good checkpoint")
        return good[0]
    return _best_good(snapshot) if text == "best" else numbered(snapshot, text)


def numbered(snapshot: Snapshot, text: str, places: Iterable[int] = (0, 1)) -> Path:
    """A checkpoint of this run by the name of its directory, its number (place 0), or its step
    (place 1), see `checkpoints.number`. Raises as `chosen`.
    """
    for place in places:
        for directory in reversed(checkpoints.finished(snapshot.directory)):
            if text in (directory.name, str(checkpoints.number(directory)[place])):
                return directory
    if not text.isascii() or not text.isdigit():
        raise UsageError(f'"{text}" is not a checkpoint directory: it has no {manifest.MANIFEST}')
    raise _missing(snapshot, f"no checkpoint {text}")


def checked(path: Path) -> Manifest:
    """Reads every byte of a checkpoint. Raises DlctlError if it is damaged."""
    if problems := checkpoints.verify(path):
        what = "\n  ".join(["this checkpoint is damaged", *problems])
        raise DlctlError(what, where=str(path), hint="dlctl checkpoint ls")
    return checkpoints.read_manifest(path)


def _missing(snapshot: Snapshot, what: str) -> NotFound:
    hint = f"dlctl checkpoint ls -j {snapshot.run_id}"
    return NotFound(f"{snapshot.run_id} has {what}", hint=hint)


def best(snapshot: Snapshot) -> Path | None:
    """The checkpoint with the best evaluation by the job's criterion; None without a criterion, or
    if there is no such checkpoint.
    """
    wanted = _wanted(snapshot)
    found = checkpoints.complete(snapshot.directory)
    return None if wanted is None else wanted.of(found.items())


def _wanted(snapshot: Snapshot) -> Best | None:
    return Best.parse(read_job(snapshot.directory).get("checkpoints", {}).get("best", ""))


def _best_good(snapshot: Snapshot) -> Path:
    found = best(snapshot)
    if found is None:
        raise NotFound(
            f"{snapshot.run_id} has no best checkpoint",
            hint='set the criterion in [checkpoints]: best = "val_loss min"; the best checkpoint '
            "is known once an evaluation has returned that metric",
        )
    checked(found)
    return found


def unwanted(snapshot: Snapshot, keep: int | None, damaged: bool) -> tuple[list[Path], list[Path]]:
    """The superfluous checkpoints: all but the best and the newest `keep` good ones (None: keep
    all); with `damaged`, also all damaged ones. Reads every byte of the checkpoints it judges.

    Returns (those to be removed, damaged ones that are not removed).
    """
    directory = snapshot.directory
    good, bad = list[Path](), list[Path]()
    for path in reversed(checkpoints.finished(directory)):
        if damaged or keep is None or len(good) < keep:
            (bad if checkpoints.verify(path) else good).append(path)
    found = set(bad) if damaged else set[Path]()
    if keep is not None and good:
        oldest = checkpoints.number(good[:keep][-1])
        window = sum(checkpoints.number(d) >= oldest for d in checkpoints.complete(directory))
        best = _wanted(snapshot)
        found |= set(lineage.superfluous(directory, [], keep=window, good=good[0], best=best))
    left = [path for path in bad if path not in found]
    return sorted(found, key=checkpoints.number), left
