"""Progress of an attached run: one live line on a terminal, plain lines or JSON elsewhere.

Everything here goes to stderr. On a terminal, rich draws a bar below the printed lines; foreign
text never passes through its markup.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from dlctl.cli.ui import console, report
from dlctl.runs import facts
from dlctl.runs.snapshot import Snapshot, load
from dlctl.util import values

PLAIN_EVERY_S = 10.0
JSON_EVERY_S = 1.0
WAIT_NOTED_EVERY_S = 15.0
NOTE_AFTER_S = 2.0
"""A wait for no particular daemon is shown only after this time."""
BAR_WIDTH = 24
BAR_MARGIN = 6
"""The spinner and the spaces between the columns."""


_TIME = re.compile(r"(?<![\w-])\d[\d.,]* ?(?:ms|s|m|h|d)\b")


def still(waiting: str) -> str:
    """The daemons a run waits for, without times: a change of this is reported."""
    return _TIME.sub("", waiting)


def open_progress() -> Progress:
    """The style that --progress requests, else the one that stderr supports."""
    ways = {"tty": Bar, "quiet": Quiet, "json": Json}
    return ways.get(console.progress_style(), Progress)()


@contextmanager
def shown() -> Iterator[Progress]:
    """`open_progress` as a context manager."""
    progress = open_progress()
    try:
        yield progress
    finally:
        progress.close()


def fields(snapshot: Snapshot) -> dict[str, Any]:
    """The values that the progress line shows."""
    workers = [facts.metrics(row) for row in snapshot.daemons if row.get("role") == "worker"]
    run = snapshot.run
    return {
        "state": snapshot.state,
        "step": run.get("step"),
        "data_epoch": run.get("data_epoch"),
        "progress": run.get("progress"),
        "loss": run.get("loss"),
        "metrics": run.get("metrics") or {},
        "staleness_mean": _over(workers, "staleness_mean", _mean),
        "push_bytes_per_s": _over(workers, "push_bytes_per_s", sum),
        "fetch_bytes_per_s": _over(workers, "fetch_bytes_per_s", sum),
        "samples_per_s": run.get("samples_per_s"),
        "evaluation": run.get("evaluation"),
        "waiting": run.get("waiting"),
    }


def text(shown: Mapping[str, Any]) -> str:
    """The fields as a line for people."""
    parts = [
        f"step {values.count(shown['step'])}",
        f"epoch {values.fixed(shown['data_epoch'], 2)}",
        f"loss {values.decimal(shown['loss'])}",
        *([console.escape(values.evaluation(shown["metrics"]))] if shown["metrics"] else []),
        f"stale {values.fixed(shown['staleness_mean'], 1)}",
        f"push {values.rate(shown['push_bytes_per_s'])}",
        f"fetch {values.rate(shown['fetch_bytes_per_s'])}",
        f"{values.fixed(shown['samples_per_s'], 0)} samples/s",
    ]
    if isinstance(shown["evaluation"], Mapping):
        parts.append(console.escape(values.evaluation(shown["evaluation"])))
    if facts.text(shown["waiting"]):
        parts.append(f"waiting {report.waiting(shown['waiting'])}")
    return "  ".join(parts)


def _mean(found: list[float]) -> float:
    return sum(found) / len(found)


def _over(rows: list[Any], key: str, combine: Callable[[list[float]], float]) -> float | None:
    found = [n for row in rows if (n := values.number(row.get(key))) is not None]
    return combine(found) if found else None


# ---------------------------------------------------------------- the four progress styles


class Progress:
    """A line at every change, and every ten seconds during training."""

    def __init__(self) -> None:
        self._waiting: tuple[str, str] | None = None
        self._told_at = -PLAIN_EVERY_S
        self._evaluation: Any = None

    def phase(self, state: str, waiting: str, waited_s: float) -> None:
        """The run is in transition (to ready, stopped) and waits for daemons."""
        now = time.monotonic()
        if not waiting and waited_s < NOTE_AFTER_S:
            return
        is_news = (state, still(waiting)) != self._waiting
        if is_news or now - self._told_at > WAIT_NOTED_EVERY_S:
            self._waiting, self._told_at = (state, still(waiting)), now
            whom = f"  waiting {report.waiting(waiting)}" if waiting else ""
            since = "" if is_news else f", {values.duration(waited_s)} so far"
            self.line(f"{console.escape(state)}{whom}{since}")

    def show(self, snapshot: Snapshot) -> None:
        """Show the training progress."""
        shown, now = fields(snapshot), time.monotonic()
        if now - self._told_at >= PLAIN_EVERY_S or shown["evaluation"] != self._evaluation:
            self._told_at, self._evaluation = now, shown["evaluation"]
            self.line(text(shown))

    def line(self, text: str) -> None:
        """A permanent line (may be styled, already escaped)."""
        console.note(text)

    def close(self) -> None:
        return


class Json(Progress):
    """Progress as JSON lines, for programs that read stderr."""

    def phase(self, state: str, waiting: str, waited_s: float) -> None:
        if (state, still(waiting)) != self._waiting:
            self._waiting = state, still(waiting)
            self._write({"state": state, "waiting": waiting, "waited_s": round(waited_s, 3)})

    def show(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        if now - self._told_at >= JSON_EVERY_S or not snapshot.is_live:
            self._told_at = now
            self._write(fields(snapshot))

    def line(self, text: str) -> None:
        self._write({"text": text})

    def _write(self, value: Mapping[str, Any]) -> None:
        console.note(json.dumps({"schema": "dlctl.progress/1", **value}))


class Quiet(Progress):
    def line(self, text: str) -> None:
        return


def _fitting(text: str, room: int) -> str:
    """As many parts of a line as fit; the bar must stay visible."""
    parts = text.split("  ")
    while len(parts) > 1 and len("  ".join(parts)) > room:
        parts.pop()
    return "  ".join(parts)[: max(room, 0)]


class _Terminal:
    """stderr as rich needs it. It ignores write errors: a closed terminal must terminate neither us
    nor rich's thread.
    """

    @property
    def encoding(self) -> str:
        return sys.stderr.encoding

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()


class Bar(Progress):
    """One line that is redrawn, with a bar if the progress is known."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        color = console.shows_color(err=True)
        self._console = Console(
            file=cast(TextIO, _Terminal()),
            force_terminal=True,
            no_color=not color,
            highlight=False,
            markup=False,
        )
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(BAR_WIDTH),
            TextColumn("{task.fields[text]}", markup=False),
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            refresh_per_second=8,
        )
        self._task = self._progress.add_task("", total=None, text="")
        self._progress.start()

    def phase(self, state: str, waiting: str, waited_s: float) -> None:
        whom = f"waiting {report.waiting(waiting)}  " if waiting else ""
        self._update(state, None, f"{whom}{values.duration(waited_s)}")

    def show(self, snapshot: Snapshot) -> None:
        shown = fields(snapshot)
        self._update(snapshot.state, values.number(shown["progress"]), text(shown))

    def _update(self, state: str, done: float | None, text: str) -> None:
        total = None if done is None else 1.0
        description = console.escape(state)
        room = self._console.width - len(description) - BAR_WIDTH - BAR_MARGIN
        self._progress.update(
            self._task,
            description=description,
            total=total,
            completed=done or 0.0,
            text=_fitting(text, room),
        )

    def line(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text.from_ansi(text), soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


# ---------------------------------------------------------------- a stop
# Messages while a command waits for the coordinator: the awaited daemons and the deadline.


DRAINING = "draining"
"""The phase with a grace period."""


def _given_up_in(progress: Mapping[str, Any]) -> str:
    """When a checkpoint gives up the daemons it waits for; "" if unknown."""
    left_s = values.number(progress.get("left_s"))
    return "" if left_s is None else f"; it continues without in {left_s:.0f}s"


class Countdown:
    """Prints the daemons that a command waits for at every change, and how long a stop still waits
    for the workers; no time if they are killed.
    """

    def __init__(self, grace_s: float | None) -> None:
        self.until = None if grace_s is None else time.monotonic() + grace_s
        self._shown: tuple[str, tuple[str, ...]] | None = None

    def __call__(self, progress: Mapping[str, Any]) -> None:
        """Handle one progress report of the verb "stop": {"phase": text, "waiting": names}."""
        phase = str(progress.get("phase", ""))
        waiting = tuple(map(str, progress.get("waiting") or ()))
        if not waiting or (phase, waiting) == self._shown:
            return
        self._shown = phase, waiting
        left = _given_up_in(progress)
        if self.until is not None and phase == DRAINING and not left:
            left = f", {max(0.0, self.until - time.monotonic()):.0f}s left"
        console.note(console.escape(f"{phase or 'stopping'}: {', '.join(waiting)}{left}"))


# ---------------------------------------------------------------- following a run
# Following a run until it ends or the user detaches.


POLL_S = 0.2
LOOK_S = 1.0
"""How often the run itself is read."""


@contextmanager
def leaving(snapshot: Snapshot, again: str) -> Iterator[None]:
    """Within this context, Ctrl-C only detaches: the run continues; `again` is the command to
    re-attach.
    """
    try:
        yield
    except KeyboardInterrupt:
        run_id = console.escape(snapshot.run_id)
        commands = f"Again: {again} -j {run_id}   Stop: dlctl stop -j {run_id}"
        console.note(f"\nDetached. {run_id} is still running.  {commands}")


def follow(snapshot: Snapshot, poll: Callable[[], None]) -> None:
    """Call `poll` five times a second until the run has ended, and once more after that."""
    while snapshot.is_live:
        look_at = time.monotonic() + LOOK_S
        while time.monotonic() < look_at:
            poll()
            time.sleep(POLL_S)
        snapshot = load(snapshot.directory)
    poll()
    reason = f" ({snapshot.reason})" if snapshot.reason else ""
    console.note(console.escape(f"-- {snapshot.run_id} {facts.became(snapshot.state)}{reason} --"))
