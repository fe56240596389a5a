"""Keeps the newest checkpoints of a run in its mirror.

Whatever has happened before, `bring` brings the newest one there, and then removes what is
superfluous: nothing before its successor is complete, and never what the run has resumed from.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError
from dlctl.job.config import JobFile
from dlctl.records.best import Best
from dlctl.records.manifest import FAILURE, MANIFEST, Manifest, parts
from dlctl.runs import checkpoints, lineage, paths
from dlctl.runs.database import RunDb
from dlctl.runs.lineage import Resume
from dlctl.stores import checkpoint_store, ownership
from dlctl.stores.checkpoint_store import CheckpointStore, Contents
from dlctl.stores.objects import StoreError
from dlctl.stores.ownership import MirrorClaim
from dlctl.util import regular
from dlctl.util.fsync import replacing

log = logging.getLogger("dlctl")
FOLDER = "mirror"
"""In the run directory."""
UPLOADED = "uploaded.json"
TELL_S = 1.0
TRIES = 3
"""Checkpoints that may be removed from the run before their upload begins."""

Tell = Callable[[int, int], None]
"""Called with the bytes that are sent, and those of the checkpoint."""


class Uploader:
    def __init__(
        self, directory: Path, job: JobFile, store: CheckpointStore, claim: MirrorClaim
    ) -> None:
        """directory: that of the run. Raises OSError."""
        self._directory, self._job, self._store, self._claim = directory, job, store, claim
        self._folder = directory / FOLDER
        self._folder.mkdir(mode=paths.PRIVATE, exist_ok=True)
        self._resumes: list[Resume] = []

    def begin(self) -> dict[str, Any] | None:
        """Become the owner of the address; the newest complete checkpoint there. Raises StoreError,
        and DlctlError for a database that cannot be read.
        """
        with closing(RunDb(self._directory, readonly=True)) as db:
            self._resumes = lineage.resumes(db)
        contents, objects = self._store.look(), self._store.objects
        run_id, claim = self._directory.name, self._claim
        ownership.retake(objects, contents.owner, contents.whose(), claim, run_id, self._resumes)
        objects.sweep()
        return _row(contents)

    def bring(self, tell: Tell) -> dict[str, Any] | None:
        """Upload the newest checkpoint, and the best one, if they are not there; the newest one
        that is then there. Raises StoreError, DlctlError and OSError.
        """
        for _ in range(TRIES):
            found = checkpoints.complete(self._directory)
            if not found:
                break
            source = [*found][-1]
            try:
                self._upload(source, found[source], tell)
                best = self._best(found)
                if best is not None and best != source:
                    self._upload(best, found[best], tell)
                self._prune(source)
                break
            except FileNotFoundError:
                if source.exists():
                    raise
        contents = self._store.look()
        return _row(contents)

    def _best(self, found: dict[Path, Manifest]) -> Path | None:
        wanted = Best.parse(self._job.checkpoints.best)
        return None if wanted is None else wanted.of(found.items())

    def _upload(self, source: Path, manifest: Manifest, tell: Tell) -> None:
        nbytes, sent, told_at = _size(manifest), 0, time.monotonic()

        def progress(count: int) -> None:
            nonlocal sent, told_at
            sent += count
            if time.monotonic() - told_at >= TELL_S:
                told_at = time.monotonic()
                tell(sent, nbytes)

        with self._linked(source, manifest) as there:
            if wrong := checkpoint_store.local_problems(there, partial(progress, 0)):
                raise DlctlError(f"it is damaged on this machine: {wrong[0]}", where=str(source))
            done = self._uploaded(source.name)
            self._store.upload(
                there, manifest, progress, has=done,
                done=lambda file: self._note(source.name, done, file),
                confirm=lambda: ownership.confirm(self._store.objects, self._claim),
            )  # fmt: skip

    # ------------------------------------------------------------ what is under way

    @contextmanager
    def _linked(self, source: Path, manifest: Manifest) -> Iterator[Path]:
        """Hard links to its files, as the run may remove them; where there are no links, its files
        themselves. Raises FileNotFoundError if it is gone.
        """
        there = self._folder / source.name
        shutil.rmtree(there, ignore_errors=True)
        there.mkdir()
        try:
            names = [part["file"] for part in parts(manifest) if part["file"]]
            try:
                for name in (*names, MANIFEST):
                    (there / name).hardlink_to(source / name)
            except FileNotFoundError:
                raise
            except OSError:
                yield source
            else:
                yield there
        finally:
            shutil.rmtree(there, ignore_errors=True)

    def _uploaded(self, name: str) -> set[str]:
        """The files of this checkpoint that an earlier attempt has uploaded."""
        try:
            noted = json.loads(regular.read_bytes(self._folder / UPLOADED))
            if noted["name"] == name and noted["mark"] == self._claim.mark:
                return {str(file) for file in noted["files"]}
        except (OSError, ValueError, TypeError, KeyError):
            pass  # Then they are uploaded again.
        return set()

    def _note(self, name: str, done: set[str], file: str) -> None:
        done.add(file)
        noted = {"name": name, "mark": self._claim.mark, "files": sorted(done)}
        with replacing(self._folder / UPLOADED) as written:
            written.write(json.dumps(noted).encode())

    # ------------------------------------------------------------ removal

    def _prune(self, source: Path) -> None:
        """Remove what is superfluous once `source` is complete there."""
        contents, keep = self._store.look(), self._job.checkpoints.keep
        if source.name not in contents.manifests or contents.missing(source.name):
            return
        readable = {Path(name): made for name, made in contents.manifests.items()}
        found = sorted(map(Path, contents.sizes), key=checkpoints.number)
        branch = lineage.chain(self._resumes)
        good, best = Path(source.name), Best.parse(self._job.checkpoints.best)
        resumed = {resume.checkpoint for resume in branch[:1]}
        for old in lineage.beyond(readable, found, branch, keep, good, best):
            if checkpoints.number(old)[0] not in resumed:
                ownership.confirm(self._store.objects, self._claim)
                self._store.remove(old.name)


def _size(manifest: Manifest) -> int:
    return sum(int(part["nbytes"]) for part in parts(manifest))


def _row(contents: Contents) -> dict[str, Any] | None:
    """The newest complete checkpoint in a mirror; None if there is none."""
    whole = [name for name in contents.names if not contents.missing(name)]
    if not whole:
        return None
    made = contents.manifests[whole[-1]]
    row = {key: made[key] for key in ("number", "step", "at")}
    return row | {"nbytes": _size(made), "is_of_failure": FAILURE in made}


def why(error: BaseException) -> tuple[str, str]:
    """What has failed, in a line, and the cause, as that of a StoreError."""
    if isinstance(error, StoreError):
        hint = f" ({error.hint.splitlines()[0]})" if error.hint and error.is_lasting else ""
        return error.message + hint, error.cause
    if isinstance(error, DlctlError):
        return error.message, "other"
    if isinstance(error, OSError):
        return f"{error.filename}: {os.strerror(error.errno or 0)}", "other"
    return f"{type(error).__name__}: {error}", "other"
