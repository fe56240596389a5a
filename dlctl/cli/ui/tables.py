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


def _limited(direction: str) -> _Cell:
    def cell(snapshot: Snapshot, row: Row) -> str:
        if not _is_now(snapshot, row):
            return NOTHING
        now = values.rate(facts.metrics(row).get(f"{direction}_bytes_per_s"))
        limit = facts.settings(row).get(direction)
        if limit is None or limit == "off":
            return now
        return f"{now} / {limit if isinstance(limit, str) else values.rate(limit)}"

    return cell


def _interval(direction: str) -> _Cell:
    """Steps from one push or fetch to the next, as in "4", or "auto (8)" if the worker chooses."""
    key = f"{direction}_every_steps"

    def cell(snapshot: Snapshot, row: Row) -> str:
        wanted = facts.settings(row).get(key)
        if wanted != AUTO:
            return values.count(wanted)
        intervals = facts.metrics(row).get("intervals")
        found = intervals.get(key) if isinstance(intervals, Mapping) else None
        return f"{AUTO} ({values.count(found)})"

    return cell


def _waits(snapshot: Snapshot, row: Row) -> str:
    share = values.number(facts.metrics(row).get("wait_share"))
    return NOTHING if share is None or not _is_now(snapshot, row) else f"{share:.0%}"


def _milliseconds(direction: str) -> _Cell:
    def cell(snapshot: Snapshot, row: Row) -> str:
        p50, p99 = (facts.metrics(row).get(f"{direction}_ms_p{p}") for p in (50, 99))
        return NOTHING if p50 is None else f"{values.decimal(p50, 2)}/{values.decimal(p99, 2)}"

    return cell


def _value(key: str, show: Callable[[Any], str] = values.count) -> _Cell:
    return lambda snapshot, row: show(row.get(key))


def _metric(key: str, show: Callable[[Any], str] = values.count) -> _Cell:
    return lambda snapshot, row: show(facts.metrics(row).get(key))


def _samples(snapshot: Snapshot, row: Row) -> str:
    rate = facts.metrics(row).get("samples_per_s") if _is_now(snapshot, row) else None
    return values.fixed(rate, 0)


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
    ">SAMPLES/S": _samples,
    ">STALE": _metric("staleness_mean", lambda value: values.fixed(value, 1)),
    ">PUSH": _limited("push"),
    ">FETCH": _limited("fetch"),
    ">RST": _restarts,
}
_WIDE: dict[str, _Cell] = {
    "HOST": _value("host", _word),
    ">INC": _value("incarnation"),
    ">LOSS": _metric("loss", values.decimal),
    ">RSS": _memory,
    ">WAITS": _waits,
    ">PUSH ms p50/p99": _milliseconds("push"),
    ">FETCH ms p50/p99": _milliseconds("fetch"),
    ">REFUSED": _metric("refused"),
}
_INTERVALS: dict[str, _Cell] = {
    ">PUSH EVERY": _interval("push"),
    ">FETCH EVERY": _interval("fetch"),
}


def table(snapshot: Snapshot, rows: Sequence[Row], *, wide: bool) -> str:
    """One line per daemon."""
    finds = any(AUTO in facts.settings(row).values() for row in snapshot.daemons)
    columns = {**_PLAIN, **(_INTERVALS if finds or wide else {}), **(_WIDE if wide else {})}
    if any(not is_here(row) for row in snapshot.daemons):
        columns = {"NAME": columns.pop("NAME"), "HOST": _WIDE["HOST"], **columns}
    return console.table({name: partial(cell, snapshot) for name, cell in columns.items()}, rows)
