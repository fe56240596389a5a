"""The daemons of a run that need attention: what is wrong, their last words, the next command."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dlctl.cli import console, report, values
from dlctl.cli.report import Row
from dlctl.cli.snapshot import DAEMON_TROUBLES, ENDED, STALE_AFTER_S, Snapshot

RECENT_S = 60.0
"""A daemon that has taken another one's place is told of for so long."""
_BIRTH = re.compile(r"INFO \w+ [\w-]+ starts, pid \d+")
"""What every log begins with says nothing of an end."""
_STARTING = ("starting", "recovering", "draining")


def lines(snapshot: Snapshot, rows: Sequence[Row]) -> list[str]:
    """Daemons that are not well or make others wait: why, their last words, the next command."""
    if snapshot.is_gone:
        return _orphans(snapshot, rows)
    found = []
    for row in rows:
        if row.get("state") in DAEMON_TROUBLES:
            found += _trouble(snapshot, row)
        elif snapshot.is_live and row.get("state") in _STARTING:
            found.append(f"· {console.escape(row['name'])}  {report.doing(row, snapshot.now)}")
        elif snapshot.is_live and _is_new(snapshot, row):
            found += _restarted(snapshot, row)
    return found


def _is_new(snapshot: Snapshot, row: Row) -> bool:
    """Whether it has taken the place of one that died a moment ago."""
    last = row.get("last_exit")
    at = values.number(last.get("at")) if isinstance(last, Mapping) else None
    died = isinstance(last, Mapping) and bool(last.get("code"))
    return died and at is not None and snapshot.now - at < RECENT_S


def _restarted(snapshot: Snapshot, row: Row) -> list[str]:
    last = row["last_exit"]
    when = values.ago(last.get("at"), snapshot.now)
    what = f"restarted; the one before: {report.exited(last)} {when}"
    return [f"· {console.escape(row['name'])}  {what}", *_last_words(snapshot, row)]


def _orphans(snapshot: Snapshot, rows: Sequence[Row]) -> list[str]:
    """What there is to say about daemons that nobody looks after."""
    job = f"-j {console.escape(snapshot.run_id)}"
    left = [row for row in rows if row.get("state") not in (*ENDED, "unknown", "backoff")]
    lines = [f"{console.style('!', fg='red')} why: dlctl logs coordinator {job}"]
    if left:
        names = ", ".join(f"{console.escape(row['name'])} (pid {row.get('pid')})" for row in left)
        lines.append(
            f"  still there: {names}; go on: dlctl recover {job}; end them: dlctl stop {job}"
        )
    return lines


def _trouble(snapshot: Snapshot, row: Row) -> list[str]:
    name = console.escape(row["name"])
    last = row.get("last_exit")
    parts = [str(row.get("state"))] if row.get("state") != "backoff" else []
    if row.get("state") == "quarantined" and report.text(row.get("error")):
        parts = [f"quarantined: {report.text(row['error'])}"]
    if row.get("state") in ("slow", "unknown", "recovering"):
        parts.append(report.text(row.get("phase")) or f"last seen {_seen(snapshot, row)}")
    if row.get("state") == "slow" and _is_silent(snapshot, row):
        parts.append(f"last heard {_seen(snapshot, row)}")
    if isinstance(last, Mapping):
        parts.append(f"{report.exited(last)} {values.ago(last.get('at'), snapshot.now)}".strip())
    if values.number(row.get("retry_at")) is not None and row.get("state") == "backoff":
        parts.append(f"restart {values.count(row.get('restarts'))}")
        parts.append(f"again in {values.duration(row['retry_at'] - snapshot.now)}")
    lines = [f"{console.style('!', fg='red')} {name}  {', '.join(filter(None, parts))}"]
    if row.get("state") != "slow":
        lines += _last_words(snapshot, row)
    if row.get("state") == "quarantined":
        lines.append(f"       back: dlctl restart {name} -j {console.escape(snapshot.run_id)}")
    return lines


def _last_words(snapshot: Snapshot, row: Row) -> list[str]:
    """What the process before this one has said last, and where there is more of it."""
    last = row.get("last_exit")
    words = last.get("last_lines") if isinstance(last, Mapping) else None
    if not isinstance(words, list) or not words:
        return []
    which = " --previous" if row.get("state") not in ("failed", "quarantined") else ""
    job = f"-j {console.escape(snapshot.run_id)}"
    said = [str(word) for word in words if not _BIRTH.fullmatch(str(word))]
    lines = [f"       | {console.escape(word)}" for word in said[-3:]]
    return [*lines, f"       logs: dlctl logs {console.escape(row['name'])}{which} {job}"]


def _is_silent(snapshot: Snapshot, row: Row) -> bool:
    heard_at = values.number(row.get("updated_at"))
    return heard_at is not None and snapshot.now - heard_at > STALE_AFTER_S


def _seen(snapshot: Snapshot, row: Row) -> str:
    return values.ago(row.get("updated_at"), snapshot.now)
