"""`dlctl report`: a run as one HTML page, which needs no network and no other file.

The charts are drawn in the browser by uPlot (MIT licence, `assets/`), from numbers in the page; a
content security policy in it forbids loading any resource. Texts come from tasks and hosts, so each
is escaped where it is inserted.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dlctl import __version__
from dlctl.observe.history import Line, Point, RunEvent, RunHistory
from dlctl.util.names import LINKS
from dlctl.util.text import escape
from dlctl.util.units import format_duration, short_size

ASSETS = Path(__file__).parent / "assets"
WORKERS_MAX = 24
"""Workers up to which each has its own line."""
EVENTS_MAX = 2000
DIGITS = 6
SOURCES = ("points", "evaluations")
LOOKS = {
    "bad": ("exit", "error", "lost", "silent", "late", "quarantine", "target", "sample"),
    "turn": ("recover", "resumed", "restart", "scale", "set"),
}
"""Styles of kinds of events; others are "calm"."""
UNMARKED = ("start", "evaluation", "batch")
"""Kinds of events without a mark in the charts: they are frequent and not informative there."""
TITLES = {
    "samples_per_s": ("Throughput", "samples per second, all workers"),
    "staleness": ("Staleness", "updates by others between fetch and push"),
    "workers": ("Workers at work", ""),
    "noise_scale": ("Gradient noise scale", "samples"),
}
Json = dict[str, Any]


def page(history: RunHistory, problems: Sequence[str] = ()) -> str:
    """The whole page, as text; with a line for each problem of the run."""
    points = history.points
    last = points[-1]
    state = str(history.run.get("state", "unknown"))
    if reason := history.run.get("reason"):
        state += f": {reason}"
    parts = {
        "TITLE": _shown(history.run_id),
        "STATE": _shown(state),
        "SUMMARY": "".join(
            f"<div><dt>{_shown(name)}</dt><dd>{_shown(value)}</dd></div>"
            for name, value in [*_summary(history), *(("problem", line) for line in problems)]
        ),
        "EVENTS": _events(history.events),
        "JOB": "\n".join(_shown(line) for line in history.job_text.splitlines()),
        "FOOTER": _shown(f"dlctl {__version__}, of what was known at {_time(last.at)}"),
        "DATA": _embedded(
            {
                "sources": _sources(history),
                "charts": _charts(history),
                "events": _marks(history),
                "pauses": history.pauses(),
            }
        ),
        "PAGE_CSS": _asset("page.css"),
        "PAGE_JS": _asset("page.js"),
        "UPLOT_CSS": _asset("uPlot.min.css"),
        "UPLOT_JS": _asset("uPlot.iife.min.js"),
        "UPLOT_LICENSE": _asset("uPlot.LICENSE"),
    }
    return re.sub(r"@@(\w+)@@", lambda found: parts[found[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _shown(text: str) -> str:
    return html.escape(escape(text))


def _embedded(value: Json) -> str:
    """JSON that cannot close its HTML element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# ---------------------------------------------------------------- numbers


def _summary(history: RunHistory) -> Iterable[tuple[str, str]]:
    first, last = history.points[0], history.points[-1]
    yield "method", history.method
    for role in ("servers", "workers"):
        section = history.job.get(role)
        if isinstance(section, Mapping) and "count" in section:
            yield role, str(section["count"])
    yield "first step", _time(first.at)
    yield "last step", _time(last.at)
    yield "time at work", format_duration(last.seconds)
    yield "steps", f"{last.step:,}"
    yield "samples", f"{last.samples:,}"
    yield "epochs", f"{last.epoch:.4g}"
    if last.loss is not None:
        yield "loss (running mean)", f"{last.loss:.4g}"
    if history.evaluations:
        newest = history.evaluations[-1]
        for name, value in newest.metrics.items():
            yield f"evaluation: {name}", f"{value:.4g} (at step {newest.step:,})"
    if last.pushes:
        yield "pushed", f"{short_size(last.push_bytes)} in {last.pushes:,} pushes"
        yield "fetched", short_size(last.fetch_bytes)
        yield from _links(history)
        yield "mean staleness", f"{last.staleness_sum / last.pushes:.3g}"


def _links(history: RunHistory) -> Iterable[tuple[str, str]]:
    """The bytes over the links of hosts, if there are several."""
    found = history.run.get(LINKS)
    for row in found.values() if isinstance(found, Mapping) else ():
        sizes = [row.get(key) for key in ("out_bytes", "in_bytes")]
        if all(type(size) is int for size in sizes):
            out, into = map(short_size, sizes)
            yield f"link of {row.get('host')}", f"{out} out, {into} in"


def _sources(history: RunHistory) -> Json:
    """Name of a source of lines -> axis -> where its values are; None: the run went back."""
    counting = history.counting()
    places = [_places(point, keep) for point, keep in zip(history.points, counting, strict=True)]
    found = {"points": _columns(places)}
    evaluations = [
        {
            "time": e.at,
            "seconds": history.of_evaluation(e, "seconds"),
            "steps": e.step if counts else None,
            "samples": history.of_evaluation(e, "samples") if counts else None,
        }
        for e, counts in zip(history.evaluations, history.counting_evaluations(), strict=True)
    ]
    found["evaluations"] = _columns(evaluations)
    kept = dict(zip(map(id, history.points), counting, strict=True))
    for name in _own_lines(history):
        rows = [(row.at, history.point_at(row.at)) for row in history.workers[name]]
        found[name] = _columns([_places(p, kept[id(p)]) | {"time": at} for at, p in rows])
    return found


def _places(point: Point, keep: bool) -> dict[str, float | None]:
    return {
        "time": point.at,
        "seconds": point.seconds,
        "steps": point.step if keep else None,
        "samples": point.samples if keep else None,
    }


def _columns(rows: Sequence[Mapping[str, float | None]]) -> Json:
    axes = ("time", "seconds", "steps", "samples")
    return {axis: [_rounded(row[axis], 2) for row in rows] for axis in axes}


def _charts(history: RunHistory) -> list[Json]:
    lines = history.lines()
    charts = [_chart("Loss", "running mean", {"loss": lines.get("loss", [])}, is_loss=True)]
    for name, line in history.task_lines().items():
        charts.append(_chart(f"Task: {name}", "running mean, from the task's loss", {name: line}))
    for name, line in history.evaluation_lines().items():
        charts.append(_chart(f"Evaluation: {name}", "", {name: line}, "evaluations"))
    for name, line in history.method_lines().items():
        charts.append(_chart(f"Method: {name}", "", {name: line}, "evaluations"))
    charts.append(_chart("Learning rate", "", _named(lines, lr="servers", inner_lr="replicas")))
    for name in ("samples_per_s", "staleness"):
        charts.append(_chart(*TITLES[name], _named(lines, **{name: "all"})))
    traffic = _named(lines, push_bytes_per_s="push", fetch_bytes_per_s="fetch")
    charts.append(_chart("Traffic", "bytes per second, all workers", traffic))
    for name in ("workers", "noise_scale"):
        charts.append(_chart(*TITLES[name], _named(lines, **{name: name})))
    charts.append(_each_worker(history))
    return [chart for chart in charts if any(any(v is not None for v in line["y"])
                                             for line in chart["lines"])]  # fmt: skip


def _named(lines: Mapping[str, Line], **names: str) -> dict[str, Line]:
    return {shown: lines[name] for name, shown in names.items() if name in lines}


def _chart(
    title: str, unit: str, lines: Mapping[str, Line], source: str = "points", is_loss: bool = False
) -> Json:
    made = [
        {"name": escape(name), "source": source, "y": [_significant(value) for value in line]}
        for name, line in lines.items()
    ]
    return {"title": escape(title), "unit": unit, "loss": is_loss, "lines": made}


def _each_worker(history: RunHistory) -> Json:
    made = [
        {
            "name": name,
            "source": name,
            "y": [_significant(row.samples_per_s) for row in history.workers[name]],
        }
        for name in _own_lines(history)
    ]
    title, unit = "Throughput of each worker", "samples per second"
    return {"title": title, "unit": unit, "loss": False, "lines": made}


def _own_lines(history: RunHistory) -> list[str]:
    return list(history.workers) if len(history.workers) <= WORKERS_MAX else []


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _significant(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


# ---------------------------------------------------------------- events


def _marks(history: RunHistory) -> list[Json]:
    found = []
    for event in history.events[-EVENTS_MAX:]:
        if event.kind in UNMARKED:
            continue
        point = history.point_at(event.at)
        text = f"{event.daemon or 'run'}: {event.text}"
        place: Json = {"time": round(event.at, 2), "seconds": point.seconds, "steps": point.step}
        place |= {"samples": point.samples, "look": _style(event.kind), "text": escape(text)}
        found.append(place)
    return found


def _style(kind: str) -> str:
    return next((look for look, kinds in LOOKS.items() if kind in kinds), "calm")


def _events(events: Sequence[RunEvent]) -> str:
    """A table; the number of omitted events is above it."""
    shown = [event for event in events if event.kind != "evaluation"]
    rows = "".join(
        f"<tr><td>{_time(event.at)}</td><td>{_shown(event.daemon or 'run')}</td>"
        f'<td class="{_style(event.kind)}">{_shown(event.kind)}</td>'
        f"<td>{_shown(event.text)}</td></tr>"
        for event in shown[-EVENTS_MAX:]
    )
    left = len(shown) - EVENTS_MAX
    note = f"<p>{left:,} earlier ones are left out.</p>" if left > 0 else ""
    head = "<tr><th>time</th><th>who</th><th>kind</th><th>what</th></tr>"
    return f'{note}<table class="events"><thead>{head}</thead><tbody>{rows}</tbody></table>'
