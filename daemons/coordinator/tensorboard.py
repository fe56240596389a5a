"""Writes the run's series as event files for TensorBoard: one TensorBoard run for all workers.

Each coordinator of a run starts a new file in the same directory. It is written in the thread that
writes run.db, and only for stored rows. Nothing depends on these files, so a failed write is only a
warning.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from daemons.coordinator.records import Exporter, Outcome
from dlctl.observe.tags import TaggedRows
from dlctl.wire.messages import Json

log = logging.getLogger("dlctl")
FOLDER = "tensorboard"
"""The directory of the event files in the run directory."""


class TensorBoard(Exporter):
    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER
        self._rows = TaggedRows()
        self._writer: Any = None
        self._has_failed = False

    def add_row(self, at: float, name: str, step: int, values: Json) -> None:
        """Write one event with all values of the row."""
        known = self._rows.values(at, name, step, values)
        if not known:
            return
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in known.items()]
        try:
            if self._writer is None:
                self._begin(at, step)
            self._put(Event(wall_time=at, step=step, summary=Summary(value=scalars)))
        except OSError as error:
            self._fail(error)

    def close(self, outcome: Outcome | None) -> None:
        if self._writer is not None:
            self._writer.close()

    def _begin(self, at: float, step: int) -> None:
        """Start a new file. TensorBoard drops rows of earlier files beyond this step: the run was
        rolled back.
        """
        self._folder.mkdir(mode=0o755, exist_ok=True)
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((self._folder / name).open("xb"))
        source = SourceMetadata(writer="dlctl")
        self._put(Event(wall_time=at, file_version="brain.Event:2", source_metadata=source))
        start = SessionLog(status=SessionLog.START)
        self._put(Event(wall_time=at, step=step, session_log=start))

    def _put(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()

    def _fail(self, error: OSError) -> None:
        """Readers stop at a torn event, so the next one starts another file."""
        if not self._has_failed:
            log.warning("cannot write for TensorBoard: %s; training continues", error)
        self._has_failed, writer, self._writer = True, self._writer, None
        if writer is not None:
            with suppress(OSError):  # Its buffer is lost, too.
                writer.close()
