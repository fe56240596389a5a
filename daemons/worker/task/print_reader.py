"""The process that writes to a worker's log what the worker and its child processes print:

    python -m daemons.worker.task.print_reader LOG NAME INCARNATION STDOUT STDERR WORKER

The last three are descriptors: of two pipes, and a pidfd of the worker. A thread of the worker
would not do. It cannot read while C code prints and holds the interpreter's lock, so a full pipe
would block both for ever; and the last words of a crash are in the pipes when the worker is gone.

It exits with the worker, whatever processes still have the pipes. Until then it holds a lock on the
log file, by which the agent knows when the last words are there (`log_tail.await_printed`).
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from daemons.log_file import DaemonLogFile, json_line
from daemons.worker.task.printed_lines import BYTES_PER_S_MAX, Limit, Lines

READ_BYTES = 1 << 16
REPORT_S = 10.0
"""Interval between two warnings about dropped lines."""
LAST_READS = 16
"""After the worker's exit: as many as empty the largest pipe, because others may be filling it."""


class PrintReader:
    def __init__(
        self, file: DaemonLogFile, name: str, incarnation: int, pipes: dict[int, str], worker: int
    ) -> None:
        """pipes: descriptor -> name of the stream. worker: its pidfd."""
        self._file, self._identity = file, (name, incarnation)
        self._pipes, self._worker = pipes, worker
        self._lines = {pipe: Lines() for pipe in pipes}
        self._limit = Limit(time.monotonic())
        self._dropped = 0
        self._report_at = math.inf
        self._poller = select.poll()
        self._poller.register(worker, select.POLLIN)
        for pipe in pipes:
            os.set_blocking(pipe, False)
            self._poller.register(pipe, select.POLLIN)

    def run(self) -> None:
        """Write lines until the worker has exited."""
        has_exited = False
        while not has_exited:
            ready = {descriptor for descriptor, _ in self._poller.poll(self._wait_ms())}
            has_exited = self._worker in ready
            for pipe in self._pipes:
                if has_exited or pipe in ready:
                    self._read(pipe, LAST_READS if has_exited else 1)
            now = time.monotonic()
            for pipe, lines in self._lines.items():
                if has_exited or lines.due <= now:
                    self._write(pipe, lines.end())
            if now >= self._report_at or (has_exited and self._dropped):
                self._report_dropped()

    def _wait_ms(self) -> float | None:
        until = min(self._report_at, *(lines.due for lines in self._lines.values()))
        return None if until == math.inf else max(0.0, until - time.monotonic()) * 1000

    def _read(self, pipe: int, times: int) -> None:
        lines = self._lines[pipe]
        for _ in range(times):
            try:
                data = os.read(pipe, READ_BYTES)
            except BlockingIOError:
                return
            if not data:  # The worker and all others have closed it, and nobody can open it again.
                with suppress(KeyError):
                    self._poller.unregister(pipe)
                return
            now = time.monotonic()
            if self._limit.is_over(now):
                self._drop(lines.skip(data, now))
            else:
                self._write(pipe, lines.feed(data, now))

    def _write(self, pipe: int, texts: list[str]) -> None:
        self._limit.spend(texts)
        at, fields = time.time(), {"stream": self._pipes[pipe]}
        self._append([json_line(at, "info", *self._identity, text, fields) for text in texts])

    def _append(self, lines: list[str]) -> None:
        if lines:
            self._file.follow()
            try:
                self._file.write("\n".join([*lines, ""]))
            except OSError:
                self._drop(len(lines))

    def _drop(self, lines: int) -> None:
        self._dropped += lines
        self._report_at = min(self._report_at, time.monotonic() + REPORT_S)

    def _report_dropped(self) -> None:
        count, self._dropped, self._report_at = self._dropped, 0, math.inf
        limit = f"more than {BYTES_PER_S_MAX >> 20} MiB/s, or a full disk"
        text = f"dropped {count:,} printed lines: {limit}"
        self._append([json_line(time.time(), "warning", *self._identity, text, {})])


def main() -> None:
    path, name, incarnation, out, err, worker = sys.argv[1:]
    file = DaemonLogFile(Path(path), 2, 1)
    file.reopen()
    # From here on it is no child of the worker: the task may wait for all children of its process.
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pipes = {int(out): "stdout", int(err): "stderr"}
    PrintReader(file, name, int(incarnation), pipes, int(worker)).run()


if __name__ == "__main__":
    main()
