"""Records where the time of a daemon goes (`dlctl/records/work_times.py`).

An event costs two clock reads, a piece of work a few more: some microseconds. The file is
written now and then, and at the end; nothing depends on it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from dlctl.records.work_times import FOLDER, SCHEMA, HandledTimes, LoopTimes, WorkTimes
from dlctl.util import cores, regular
from dlctl.util.fsync import replacing
from dlctl.wire.kinds import kind_of, nbytes_of
from dlctl.wire.machine import Event
from dlctl.wire.messages import Json, Register

log = logging.getLogger("dlctl")
WRITE_EVERY_S = 15.0
TRANSPORT = "ZMQbg"
"""The names of libzmq's threads begin so."""


class LoopClock:
    """Measures what a loop handles."""

    def __init__(self) -> None:
        self._handled: dict[str, HandledTimes] = {}
        self._elsewhere_s = 0.0
        self._thread: threading.Thread | None = None
        self._began_s = 0.0
        self._waited_s = 0.0

    def begin(self) -> None:
        """The loop runs from now on, in this thread."""
        self._thread, self._began_s = threading.current_thread(), time.thread_time()
        self._waited_s = _waited_s()

    @contextmanager
    def handling(self, event: Event) -> Iterator[None]:
        """Around the handling of an event, in any thread; the loop's lock is held."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            cpu_s = time.thread_time() - began_s
            times = self._handled.setdefault(kind_of(event), HandledTimes())
            times.count += 1
            times.cpu_s += cpu_s
            times.nbytes += nbytes_of(event)
            if threading.current_thread() is not self._thread:
                self._elsewhere_s += cpu_s

    def times(self) -> LoopTimes:
        return LoopTimes(
            self._handled.copy(), self._cpu_s(), self._elsewhere_s, _schedstat(TRANSPORT)[0]
        )

    def waited_s(self) -> float:
        """How long the living threads of this process were ready and had no core since `begin`:
        before, imports wait for those of other daemons.
        """
        return max(0.0, _waited_s() - self._waited_s)

    def _cpu_s(self) -> float:
        if self._thread is None or self._thread.ident is None or not self._thread.is_alive():
            return 0.0
        clock = time.pthread_getcpuclockid(self._thread.ident)
        return time.clock_gettime(clock) - self._began_s


class TimesFile:
    """The record of one daemon, written from its loop."""

    def __init__(
        self,
        path: Path,
        clock: LoopClock,
        work: Mapping[str, WorkTimes],
    ) -> None:
        """work: what a worker's compute thread does."""
        self._path = path
        self._clock = clock
        self._work = work
        self._due_at = time.monotonic() + WRITE_EVERY_S
        self._is_broken = False

    def write_if_due(self) -> None:
        if time.monotonic() >= self._due_at:
            self._due_at = time.monotonic() + WRITE_EVERY_S
            self.write()

    def write(self) -> None:
        """A disk that cannot take it is no reason to stop; one warning is logged."""
        values: Json = {
            "schema": SCHEMA,
            "cores": cores.usable(),
            "waited_s": self._clock.waited_s(),
            "loop": self._clock.times().to_json(),
            "work": {kind: times.to_json() for kind, times in dict(self._work).items()},
        }
        try:
            self._path.parent.mkdir(exist_ok=True)
            # The loop writes it, which must not wait for a busy disk.
            with replacing(self._path, syncs=False) as file:
                file.write(json.dumps(values).encode())
        except OSError as error:
            if not self._is_broken:
                self._is_broken = True
                log.warning(
                    "cannot record where the time goes (%s): %s", self._path, error.strerror
                )


def _schedstat(named: str = "") -> tuple[float, float]:
    """CPU seconds of the living threads of this process whose names begin so, and how long they
    were ready and had no core. 0 on a kernel that does not count it.
    """
    used = waited = 0
    with suppress(OSError, ValueError, IndexError):
        for thread in Path("/proc/self/task").iterdir():
            if regular.read_bytes(thread / "comm").startswith(named.encode()):
                figures = regular.read_bytes(thread / "schedstat").split()
                used, waited = used + int(figures[0]), waited + int(figures[1])
    return used / 1e9, waited / 1e9


def _waited_s() -> float:
    return _schedstat()[1]


class WaitMeter:
    """How long the thread that reads it was ready and had no core."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        with suppress(OSError):
            self._file = regular.opened(Path("/proc/thread-self/schedstat"))

    def __del__(self) -> None:
        """Its thread has ended."""
        if self._file is not None:
            self._file.close()

    def waited_s(self) -> float:
        """0 on a kernel that does not count it."""
        if self._file is None:
            return 0.0
        try:
            return int(os.pread(self._file.fileno(), 64, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0


def path_of(directory: Path, who: Register) -> Path:
    """The file of a daemon. directory: the run's, or that of this host."""
    return directory / FOLDER / f"{who.name}.{who.incarnation}.json"
