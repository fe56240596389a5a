"""Creates, completes and removes checkpoint directories in a separate thread, one at a time: a slow
or hanging disk does not block the coordinator.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from daemons.loop import Loop
from daemons.process import reason_of
from dlctl.model import frozen
from dlctl.records.best import Best
from dlctl.records.manifest import SCHEMA
from dlctl.roles.coordinator import records as j
from dlctl.runs import checkpoints, lineage
from dlctl.runs.database import RunDb

log = logging.getLogger("dlctl")


class Directories:
    def __init__(self, directory: Path, loop: Loop) -> None:
        self.directory = directory
        self._loop = loop
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        loop.perform(j.BeginCheckpoint, lambda effect: thread.submit(self._begin, effect))
        loop.perform(j.CompleteCheckpoint, lambda effect: thread.submit(self._complete, effect))

    def _begin(self, effect: j.BeginCheckpoint) -> None:
        try:
            checkpoints.remove_incomplete(self.directory, effect.number, log.warning)
            path = checkpoints.create(self.directory, effect.step, effect.number)
            self._loop.post(j.CheckpointBegun(effect.number, str(path), ""))
        except Exception as error:
            self._loop.post(j.CheckpointBegun(effect.number, "", reason_of(error)))

    def _complete(self, effect: j.CompleteCheckpoint) -> None:
        directory, error = Path(effect.directory), ""
        manifest = effect.manifest | {"schema": SCHEMA, "at": time.time()}
        try:
            checkpoints.share_frozen(self.directory / frozen.FOLDER, directory, manifest)
            checkpoints.write_manifest(directory, manifest)
        except Exception as failure:
            error = reason_of(failure)
        if not error:
            self._prune(directory, effect.keep, effect.best)
        self._loop.post(j.CheckpointEnded(effect.number, error))

    def _prune(self, newest: Path, keep: int, best: str) -> None:
        """Remove old checkpoints; a failure does not affect the new one.

        Damaged checkpoints that the run has rolled back from must not displace good ones, nor must
        those that were saved after a failure.
        """
        try:
            with closing(RunDb(self.directory, readonly=True)) as db:  # This thread's own.
                branch = lineage.chain(lineage.resumes(db))
            wanted = Best.parse(best)
            old = lineage.superfluous(self.directory, branch, keep=keep, good=newest, best=wanted)
            for directory in old:
                checkpoints.remove(directory, log.warning)
        except Exception as error:
            why = str(error) if isinstance(error, sqlite3.Error) else reason_of(error)
            log.warning("cannot remove old checkpoints: %s", why)
