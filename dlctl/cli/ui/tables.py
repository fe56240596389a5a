"""The table of a run's daemons, as `dlctl status` shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dlctl.cli.ui import console, report
from dlctl.runs import facts
from dlctl.runs.facts import Row
from dlctl.runs.snapshot import ENDED, GONE, Snapshot, is_here
from dlctl.settings import AUTO
from dlctl.util import processes, values
from dlctl.util.names import COORDINATOR
from dlctl.util.values import NOTHING

_Cell = Callable[[Snapshot, Row], str]


def _up(snapshot: Snapshot, row: Row) -> str:
    # The process is more reliable than a coordinator that was restarted itself.
    age_s, began = processes.age_s(row.get("pid_start")), values.number(row.get("started_at"))
    if age_s is None and began is not None:
        age_s = snapshot.now - began
    if age_s is None or row.get("pid") is None or row.get("state") in (*ENDED, GONE):
        return NOTHING
    return values.duration(age_s)


def _step(snapshot: Snapshot, row: Row) -> str:
    if row.get("role") == "server":
        version = values.count(facts.metrics(row).get("version"))
        return version if version == NOTHING else f"v{version}"
    return values.count(facts.metrics(row).get("step"))


def _is_now(snapshot: Snapshot, row: Row) -> bool:
    """Whether a daemon's reported rates are current."""
    return snapshot.is_current and row.get("state") in ("running", "draining")


def _limited(direction: str, snapshot: Snapshot, row: Row) -> str:
    if not _is_now(snapshot, row):
        return NOTHING
    now = values.rate(facts.metrics(row).get(f"{direction}_bytes_per_s"))
    limit = facts.settings(row).get(direction)
    if limit is None or limit == "off":
        return now
    return f"{now} / {limit if isinstance(limit, str) else values.rate(limit)}"


def _interval(key: str, snapshot: Snapshot, row: Row) -> str:
    """Steps from one push or fetch to the next, as in "4", or "auto (8)" if the worker chooses."""
    wanted = facts.settings(row).get(key)
    if wanted != AUTO:
        return values.count(wanted)
    intervals = facts.metrics(row).get("intervals")
    found = intervals.get(key) if isinstance(intervals, Mapping) else None
    return f"{AUTO} ({values.count(found)})"


def _milliseconds(direction: str, snapshot: Snapshot, row: Row) -> str:
    p50, p99 = (facts.metrics(row).get(f"{direction}_ms_p{p}") for p in (50, 99))
    return NOTHING if p50 is None else f"{values.decimal(p50, 2)}/{values.decimal(p99, 2)}"


def _percent(value: Any) -> str:
    return NOTHING if values.number(value) is None else f"{value:.0%}"


def _value(key: str, show: Callable[[Any], str] = values.count) -> _Cell:
    return lambda snapshot, row: show(row.get(key))


def _metric(key: str, show: Callable[[Any], str] = values.count) -> _Cell:
    return lambda snapshot, row: show(facts.metrics(row).get(key))


def _current(key: str, show: Callable[[Any], str]) -> _Cell:
    """A metric that changes all the time."""
    return lambda snapshot, row: show(
        facts.metrics(row).get(key) if _is_now(snapshot, row) else None
    )


def _restarts(snapshot: Snapshot, row: Row) -> str:
    if row.get("role") != COORDINATOR:
        return values.count(row.get("restarts"))
    return values.count(len(facts.takeovers(snapshot.directory)))


def _memory(snapshot: Snapshot, row: Row) -> str:
    """Unknown for a process on another host."""
    there = row if is_here(row) else {}
    return values.size(processes.rss_bytes(there.get("pid"), there.get("pid_start")))


def _word(value: Any) -> str:
    return str(value) if value is not None else NOTHING


_PLAIN: dict[str, _Cell] = {
    "NAME": _value("name", _word),
    ">PID": _value("pid", _word),
    "STATE": _value("state", report.state),
    ">UP": _up,
    ">STEP": _step,
    ">SAMPLES/S": _current("samples_per_s", lambda value: values.fixed(value, 0)),
    ">STALE": _metric("staleness_mean", lambda value: values.fixed(value, 1)),
    ">PUSH": partial(_limited, "push"),
    ">FETCH": partial(_limited, "fetch"),
    ">RST": _restarts,
}
_WIDE: dict[str, _Cell] = {
    "HOST": _value("host", _word),
    ">INC": _value("incarnation"),
    ">LOSS": _metric("loss", values.decimal),
    ">RSS": _memory,
    ">WAITS": _current("wait_share", _percent),
    ">PUSH ms p50/p99": partial(_milliseconds, "push"),
    ">FETCH ms p50/p99": partial(_milliseconds, "fetch"),
    ">REFUSED": _metric("refused"),
}
_INTERVALS: dict[str, _Cell] = {
    ">PUSH EVERY": partial(_interval, "push_every_steps"),
    ">FETCH EVERY": partial(_interval, "fetch_every_steps"),
}


def table(snapshot: Snapshot, rows: Sequence[Row], *, wide: bool) -> str:
    """One line per daemon."""
    finds = any(AUTO in facts.settings(row).values() for row in snapshot.daemons)
    columns = {**_PLAIN, **(_INTERVALS if finds or wide else {}), **(_WIDE if wide else {})}
    if any(not is_here(row) for row in snapshot.daemons):
        columns = {"NAME": columns.pop("NAME"), "HOST": _WIDE["HOST"], **columns}
    return console.table({name: partial(cell, snapshot) for name, cell in columns.items()}, rows)
