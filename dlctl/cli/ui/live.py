"""Progress of an attached run: one live line on a terminal, plain lines or JSON elsewhere.

Everything here goes to stderr.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dlctl.cli.ui import console, report
from dlctl.runs import facts
from dlctl.runs.snapshot import Snapshot, load
from dlctl.util import values

BAR_WIDTH = 24
COLUMNS = 80
"""The width of a terminal of unknown width."""
LOOK_S = 0.5
"""Interval between two reads of an attached or awaited run."""
FIELDS = (
    "step", "data_epoch", "progress", "loss", "samples_per_s", "evaluation", "evaluation_step",
    "waiting",
)  # fmt: skip


@contextmanager
def progress() -> Iterator[ProgressLines]:
    """Progress in the style that --progress requests, else in the one that stderr supports."""
    ways = {"tty": Bar, "quiet": Quiet, "json": Json}
    try:
        yield ways.get(console.progress_style(), ProgressLines)()
    finally:
        console.put_live("")


def fields(snapshot: Snapshot) -> dict[str, Any]:
    """The values that the progress line shows."""
    workers = [facts.metrics(row) for row in snapshot.daemons if row.get("role") == "worker"]

    def each(key: str) -> list[float]:
        return [n for row in workers if (n := values.number(row.get(key))) is not None]

    staleness = each("staleness_mean")
    return {
        "state": snapshot.state,
        **{key: snapshot.run.get(key) for key in FIELDS},
        "metrics": snapshot.run.get("metrics") or {},
        "staleness_mean": sum(staleness) / len(staleness) if staleness else None,
        "push_bytes_per_s": sum(each("push_bytes_per_s")) or None,
        "fetch_bytes_per_s": sum(each("fetch_bytes_per_s")) or None,
    }


def text(shown: Mapping[str, Any]) -> str:
    """The fields as a line for people."""
    parts = [
        *report.figures(shown),
        f"stale {values.fixed(shown['staleness_mean'], 1)}",
        f"push {values.rate(shown['push_bytes_per_s'])}",
        f"fetch {values.rate(shown['fetch_bytes_per_s'])}",
        f"{values.fixed(shown['samples_per_s'], 0)} samples/s",
    ]
    if isinstance(shown["evaluation"], Mapping):
        parts.append(console.escape(f"evaluation {values.measured(shown['evaluation'])}"))
    if facts.text(shown["waiting"]):
        parts.append(f"waiting for {facts.text(shown['waiting'])}")
    return "  ".join(parts)


class ProgressLines:
    """A line at every change of the state or the evaluation, and every ten seconds."""

    every_s = 10.0

    def __init__(self) -> None:
        self._news: Any = None
        self._told_at = -math.inf

    def phase(self, state: str, waiting: str, waited_s: float) -> None:
        """The run is in transition (to ready, stopped) and waits for daemons."""
        if self._is_due(state):
            data = {"state": state, "waiting": waiting, "waited_s": round(waited_s, 3)}
            self._put(data, f"{console.escape(state)}  {_wait(waiting, waited_s)}")

    def show(self, snapshot: Snapshot) -> None:
        """Show the training progress."""
        shown = fields(snapshot)
        if self._is_due((snapshot.is_live, shown["evaluation"])):
            self._put(shown, text(shown))

    def _is_due(self, news: Any) -> bool:
        now = time.monotonic()
        if news == self._news and now - self._told_at < self.every_s:
            return False
        self._news, self._told_at = news, now
        return True

    def line(self, text: str) -> None:
        """A permanent line (may be styled, already escaped)."""
        self._put({"text": text}, text)

    def _put(self, data: Mapping[str, Any], text: str) -> None:
        console.write_err(text)


class Json(ProgressLines):
    """Progress as JSON lines, every second, for programs that read stderr."""

    every_s = 1.0

    def _put(self, data: Mapping[str, Any], text: str) -> None:
        console.write_err(json.dumps({"schema": "dlctl.progress/1", **data}))


class Quiet(ProgressLines):
    def _put(self, data: Mapping[str, Any], text: str) -> None:
        return


class Bar(ProgressLines):
    """One line that is redrawn, with a bar if the progress is known."""

    def phase(self, state: str, waiting: str, waited_s: float) -> None:
        self._draw(state, None, _wait(waiting, waited_s))

    def show(self, snapshot: Snapshot) -> None:
        shown = fields(snapshot)
        self._draw(snapshot.state, values.number(shown["progress"]), text(shown))

    def _draw(self, state: str, done: float | None, text: str) -> None:
        full = round(min(max(done or 0.0, 0.0), 1.0) * BAR_WIDTH)
        bar = "" if done is None else f"[{'#' * full}{'-' * (BAR_WIDTH - full)}]  "
        console.put_live(f"{console.escape(state)}  {bar}{text}"[: _columns() - 1])


def _wait(waiting: str, waited_s: float) -> str:
    whom = f"waiting for {facts.text(waiting)}  " if waiting else ""
    return f"{whom}{values.duration(waited_s)}"


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or COLUMNS
    except (OSError, ValueError, AttributeError):
        return COLUMNS


def note_progress(progress: Mapping[str, Any]) -> None:
    """Note what the coordinator reports of a request: {"phase": text, "waiting": names, "left_s":
    of a checkpoint, until it continues without them}.
    """
    left_s = values.number(progress.get("left_s"))
    left = "" if left_s is None else f"; it continues without in {left_s:.0f}s"
    if waiting := ", ".join(map(str, progress.get("waiting") or ())):
        console.note(f"{progress.get('phase') or 'stopping'}: {waiting}{left}")


def follow(snapshot: Snapshot, poll: Callable[[], None]) -> bool:
    """Call `poll` twice a second until the run has ended, and once more after that. Ctrl-C only
    detaches: the run continues. Whether it has ended.
    """
    try:
        while snapshot.is_live:
            poll()
            time.sleep(LOOK_S)
            snapshot = load(snapshot.directory)
    except KeyboardInterrupt:
        console.note(f"\nDetached. {snapshot.run_id} is still running.")
        console.commands(report.next_commands(snapshot))
        return False
    poll()
    reason = f" ({snapshot.reason})" if snapshot.reason else ""
    console.note(f"-- {snapshot.run_id} {facts.became(snapshot.state)}{reason} --")
    return True
