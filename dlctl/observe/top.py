"""`dlctl top`: the state of a run, in the whole terminal, until q is pressed.

It reads the run's database once a second, as `status` does, and sends no requests to daemons.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import termios
import tty
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dlctl.observe import chart
from dlctl.observe.history import RunHistory
from dlctl.runs.database import ENDED
from dlctl.util import values
from dlctl.util.text import escape
from dlctl.util.units import format_duration

EVERY_S = 1.0
SPARK_WIDTH = 12
CURVE_HEIGHT_MIN, CURVE_HEIGHT_MAX = 4, 16
LABEL_WIDTH = 10
OTHER_LINES = 4
"""The heads of the curve and of the table, a blank line, the foot."""
PROBLEMS_MAX = 3
MARGIN = 2
COLUMNS: dict[str, Literal["left", "right"]] = {
    "NAME": "left", "STATE": "left", "STEP": "right", "SAMPLES/S": "right", "": "left",
    "STALE": "right", "PUSH": "right", "FETCH": "right", "RST": "right",
}  # fmt: skip
LEAST = ("", "STALE", "RST", "FETCH", "PUSH", "SAMPLES/S", "STEP")
"""Columns that are left out if there is no room, in this order."""
LOG_FROM = 30.0
"""Ratio of the largest to the smallest loss from which the scale is logarithmic."""
STYLES = {
    "running": "green", "finished": "green", "degraded": "yellow", "backoff": "yellow",
    "recovering": "yellow", "slow": "yellow", "failed": "red", "quarantined": "red",
    "gone": "red", "silent": "red", "unknown": "red",
}  # fmt: skip
Row = Mapping[str, Any]


class TopView(NamedTuple):
    """All data shown at one moment."""

    run_id: str
    state: str
    reason: str
    run: Row
    """The run's keys, as `status` shows them."""
    daemons: Sequence[Row]
    """Servers and workers."""
    history: RunHistory | None
    """None: there is none yet."""
    trouble: str = ""
    """Why there is no history, if that should be shown."""
    problems: Sequence[str] = ()
    """A line each."""


def watch(look: Callable[[], TopView], *, color: bool) -> None:
    """Show what `look` returns, once a second, until q is pressed. Raises KeyboardInterrupt at
    Ctrl-C, with the terminal as it was before. stdin and stdout have to be a terminal.
    """
    console = Console(no_color=not color, highlight=False, markup=False, emoji=False)
    rates: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=SPARK_WIDTH))
    with _single_keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            view = look()
            for row in view.daemons:
                rates[row["name"]].append(values.number(_metrics(row).get("samples_per_s")) or 0.0)
            live.update(draw(view, rates, console.width, console.height), refresh=True)
            if "q" in pressed(EVERY_S).lower():
                return


@contextmanager
def _single_keys() -> Iterator[Callable[[float], str]]:
    """Keys without Enter and without echo: `pressed(timeout_s)` returns typed characters. Ctrl-Z is
    off, as a shell would show its prompt in the middle of the screen. SIGTERM exits in an orderly
    way.
    """
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    ended = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    def pressed(timeout_s: float) -> str:
        ready, _, _ = select.select([stdin], [], [], timeout_s)
        # A read of no bytes: the terminal is gone.
        return (os.read(stdin, 64).decode(errors="replace") or "q") if ready else ""

    try:
        tty.setcbreak(stdin)
        now = termios.tcgetattr(stdin)
        now[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(stdin, termios.TCSANOW, now)
        yield pressed
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, ended)


# ---------------------------------------------------------------- the picture


def draw(view: TopView, rates: Mapping[str, Sequence[float]], width: int, height: int) -> Group:
    """One screen of this size in characters. The curve gets the room left by the daemons."""
    problems = [Text(f"! {escape(p)}", style="red") for p in view.problems[:PROBLEMS_MAX]]
    above = [*_head(view), *problems]
    taken = sum(max(1, math.ceil(text.cell_len / width)) for text in above) + OTHER_LINES
    room = height - taken - len(view.daemons) - MARGIN
    room = min(max(room, CURVE_HEIGHT_MIN), CURVE_HEIGHT_MAX)
    shown = max(1, height - taken - room - MARGIN)
    parts: list[Any] = [*above, *_curve(view, width, room), Text("")]
    parts.append(table(view, shown, rates, width))
    if len(view.daemons) > shown:
        parts.append(Text(f"and {len(view.daemons) - shown} more daemons: dlctl status"))
    foot = "q leaves" if view.state in ENDED else "q leaves; the run continues"
    parts.append(Text(foot, style="dim"))
    return Group(*parts)


def _head(view: TopView) -> list[Text]:
    run = view.run
    first = Text(escape(view.run_id), style="bold")
    first.append(f"  {escape(view.state)}", style=STYLES.get(view.state, "cyan"))
    first.append(f"  {escape(view.reason)}" if view.reason else "", style="not bold")
    totals = run.get("totals")
    worked_s = totals.get("seconds") if isinstance(totals, Mapping) else None
    parts = [
        f"step {values.count(run.get('step'))}",
        f"epoch {values.fixed(run.get('data_epoch'), 2)}",
        f"loss {values.decimal(run.get('loss'))}",
        f"at work {values.duration(worked_s)}",
    ]
    if view.state not in ENDED:
        parts.append(f"{values.fixed(run.get('samples_per_s'), 0)} samples/s")
    if (progress := values.number(run.get("progress"))) is not None:
        parts.append(f"{progress:.0%} done")
    evaluation, waiting = run.get("evaluation"), run.get("waiting")
    waiting_text = f"waiting for {escape(waiting)}" if isinstance(waiting, str) and waiting else ""
    lines = [first, Text("  ".join(parts)), Text(""), Text(waiting_text, style="yellow")]
    if isinstance(evaluation, Mapping):
        shown = escape(values.measured(evaluation))
        lines[2] = Text(f"evaluation {shown} at step {values.count(run.get('evaluation_step'))}")
    return lines


def _curve(view: TopView, width: int, height: int) -> list[Text]:
    """The loss over the running time, with its largest and smallest value beside it; logarithmic
    where that shows more.
    """
    points = view.history.points if view.history is not None else ()
    known = [(point.seconds, point.loss) for point in points if point.loss is not None]
    if not known:
        return [Text(""), Text(escape(view.trouble) or "no loss yet", style="dim")]
    xs, ys = [x for x, _ in known], [y for _, y in known]
    is_log = min(ys) > 0 and max(ys) / min(ys) > LOG_FROM
    heights = [math.log(y) for y in ys] if is_log else ys
    drawn = chart.lines(xs, heights, max(1, width - LABEL_WIDTH - 1), height)
    labels = [""] * height
    labels[-1], labels[0] = f"{min(ys):.4g}", f"{max(ys):.4g}"
    rows = [
        Text(f"{label:>{LABEL_WIDTH}} ", style="dim").append(line, style="not dim cyan")
        for label, line in zip(labels, drawn, strict=True)
    ]
    scale = ", log scale" if is_log else ""
    head = f"{'loss':>{LABEL_WIDTH}} over {format_duration(xs[-1] - xs[0])} at work{scale}"
    return [Text(head, style="dim"), *rows]


def table(view: TopView, count: int, rates: Mapping[str, Sequence[float]], width: int) -> Table:
    """The first `count` daemons, in as many columns as there is room for. rates: the earlier values
    of each.
    """
    cells = [_cells(row, rates.get(row["name"], ()), view.state in ENDED) for row in view.daemons]
    columns = {name: [row[name] for row in cells[:count]] for name in COLUMNS}
    for name in LEAST:
        if sum(max(map(cell_len, [name, *map(str, c)])) + 2 for name, c in columns.items()) > width:
            del columns[name]
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        made.add_column(name, justify=COLUMNS[name], no_wrap=True)
    for line in zip(*columns.values(), strict=True):
        made.add_row(*line)
    return made


def _cells(row: Row, before: Sequence[float], is_over: bool) -> dict[str, str | Text]:
    metrics, state = _metrics(row), str(row.get("state"))
    now = {} if is_over else metrics
    is_server = row.get("role") == "server"
    step = values.count(metrics.get("version" if is_server else "step"))
    return {
        "NAME": escape(str(row["name"])),
        "STATE": Text(escape(state), style=STYLES.get(state, "cyan")),
        "STEP": f"v{step}" if is_server else step,
        "SAMPLES/S": values.fixed(now.get("samples_per_s"), 0),
        "": _spark(before, is_over=is_over),
        "STALE": values.fixed(metrics.get("staleness_mean"), 1),
        "PUSH": values.rate(now.get("push_bytes_per_s")),
        "FETCH": values.rate(now.get("fetch_bytes_per_s")),
        "RST": values.count(row.get("restarts")),
    }


def _spark(before: Sequence[float], *, is_over: bool) -> Text:
    shown = "" if is_over else chart.sparkline(before, SPARK_WIDTH)
    return Text(f"{shown:<{SPARK_WIDTH}}", style="cyan")


def _metrics(row: Row) -> Row:
    found = row.get("metrics")
    return found if isinstance(found, Mapping) else {}
