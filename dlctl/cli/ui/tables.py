"""The table of a run's daemons, as `dlctl status` shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dlctl.cli.ui import console, report
from dlctl.job.settings import AUTO
from dlctl.runs import facts
from dlctl.runs.facts import Row
from dlctl.runs.snapshot import ENDED, GONE, Snapshot, is_here
from dlctl.util import processes, values
from dlctl.util.names import COORDINATOR
from dlctl.util.values import NOTHING


def table(snapshot: Snapshot, rows: Sequence[Row], *, wide: bool) -> str:
    """One line per daemon."""
    finds = any(AUTO in facts.settings(row).values() for row in snapshot.daemons)
    has_hosts = any(not is_here(row) for row in snapshot.daemons)
    shown = []
    for row in rows:
        cells = {"NAME": row.get("name")}
        cells |= {"HOST": row.get("host")} if has_hosts else {}
        cells |= _plain(snapshot, row)
        cells |= _intervals(row) if finds or wide else {}
        shown.append(cells | (_wide(snapshot, row) if wide else {}))
    return console.table(shown)


def _plain(snapshot: Snapshot, row: Row) -> dict[str, Any]:
    metrics, now = facts.metrics(row), _now(snapshot, row)
    is_server = row.get("role") == "server"
    step = values.count(metrics.get("version" if is_server else "step"))
    restarts = row.get("restarts")
    if row.get("role") == COORDINATOR:
        restarts = len(facts.takeovers(snapshot.directory))
    return {
        ">PID": row.get("pid"),
        "STATE": report.state(row.get("state")),
        ">UP": _up(snapshot, row),
        ">STEP": f"v{step}" if is_server and step != NOTHING else step,
        ">SAMPLES/S": values.fixed(now.get("samples_per_s"), 0),
        ">STALE": values.fixed(metrics.get("staleness_mean"), 1),
        ">PUSH": _rate(now, "push"),
        ">FETCH": _rate(now, "fetch"),
        ">RST": values.count(restarts),
    }


def _wide(snapshot: Snapshot, row: Row) -> dict[str, Any]:
    metrics, blocked = facts.metrics(row), values.number(_now(snapshot, row).get("wait_share"))
    there = row if is_here(row) else {}  # The memory of a process on another host is unknown.
    return {
        "HOST": row.get("host"),
        ">INC": values.count(row.get("incarnation")),
        ">LOSS": values.decimal(metrics.get("loss")),
        ">RSS": values.size(processes.rss_bytes(there.get("pid"), there.get("pid_start"))),
        ">WAITS": NOTHING if blocked is None else f"{blocked:.0%}",
        ">PUSH ms p50/p99": _latency(metrics, "push"),
        ">FETCH ms p50/p99": _latency(metrics, "fetch"),
        ">REFUSED": values.count(metrics.get("refused")),
    }


def _intervals(row: Row) -> dict[str, Any]:
    """Steps from one push or fetch to the next, as in "4", or "auto (8)" if the worker chooses."""
    found = facts.metrics(row).get("intervals")
    cells = {}
    for header, key in ((">PUSH EVERY", "push_every_steps"), (">FETCH EVERY", "fetch_every_steps")):
        cells[header] = values.count(wanted := facts.settings(row).get(key))
        if wanted == AUTO:
            chosen = found.get(key) if isinstance(found, Mapping) else None
            cells[header] = f"{AUTO} ({values.count(chosen)})"
    return cells


def _now(snapshot: Snapshot, row: Row) -> Row:
    """The metrics of a daemon that change all the time; {} if they are not current."""
    is_now = snapshot.is_current and row.get("state") in ("running", "draining")
    return facts.metrics(row) if is_now else {}


def _up(snapshot: Snapshot, row: Row) -> str:
    # The process is more reliable than a coordinator that was restarted itself.
    age_s, began = processes.age_s(row.get("pid_start")), values.number(row.get("started_at"))
    if age_s is None and began is not None:
        age_s = snapshot.now - began
    is_over = row.get("pid") is None or row.get("state") in (*ENDED, GONE)
    return NOTHING if is_over else values.duration(age_s)


def _rate(now: Row, direction: str) -> str:
    """A rate for people: "4 MB/s", or with a limit "4 MB/s / 5 MB/s"."""
    shown = values.rate(now.get(f"{direction}_bytes_per_s"))
    limit = facts.settings({"metrics": now}).get(direction)
    if limit is None or limit == "off":
        return shown
    return f"{shown} / {limit if isinstance(limit, str) else values.rate(limit)}"


def _latency(metrics: Row, direction: str) -> str:
    p50, p99 = (metrics.get(f"{direction}_ms_p{p}") for p in (50, 99))
    return NOTHING if p50 is None else f"{values.decimal(p50, 2)}/{values.decimal(p99, 2)}"
