"""Who waits for whom in a run, and what all of it comes down to: a forest, root causes first.

The daemons say themselves whom they wait for; troubles, limits and the run's own word are added. A
wait for a daemon that is well, by one that gets its answers, is the ordinary way of a message and
is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlctl import processes, settings
from dlctl.cli import report, values
from dlctl.cli.snapshot import ENDED, STALE_AFTER_S, Snapshot
from dlctl.errors import UsageError

WAIT_S = 2.0
"""Shorter waits are answers on their way."""
AT_LIMIT = 0.8
"""Of a limit: whoever comes so close to it is held back by it."""
COORDINATOR = "coordinator"
Row = Mapping[str, Any]
_NAME = re.compile(r"\b(?:worker|server|agent)-\d+\b|\bcoordinator\b")


@dataclass(slots=True)
class Wait:
    """A daemon (or a limit) that others wait for; and those who do."""

    name: str
    what: str
    """What it is at, or what is wrong with it: plain text."""
    since: float | None
    """Seconds since 1970; None if nobody knows."""
    next: str = ""
    """The command that helps."""
    stale_s: float | None = None
    """Age of what is known of it, if that is too old."""
    waiting: list[Wait] = field(default_factory=list)

    def names(self) -> Iterator[str]:
        """Its own name and those of all who wait for it."""
        yield self.name
        for wait in self.waiting:
            yield from wait.names()


def causes(snapshot: Snapshot) -> list[Wait]:
    """The root causes of all waiting in a living run; [] if nobody waits."""
    rows = {str(row["name"]): row for row in snapshot.daemons}
    troubles = _troubles(snapshot, rows)
    edges = dict(_edges(snapshot, rows, troubles))
    roots = [name for name in _targets(edges) if name not in edges]
    roots += [name for name in troubles if name not in roots and name not in edges]
    roots.sort(key=lambda name: name not in troubles)
    ring = [] if roots else list(edges)[:1]
    found = [_tree(snapshot, rows, troubles, edges, name, frozenset()) for name in roots + ring]
    found += _limits(snapshot)
    return [*found, *_run_itself(snapshot, found)]


def _targets(edges: Mapping[str, Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(target for targets in edges.values() for target in targets))


def _tree(
    snapshot: Snapshot,
    rows: Mapping[str, Row],
    troubles: Mapping[str, Wait],
    edges: Mapping[str, Sequence[str]],
    name: str,
    above: frozenset[str],
) -> Wait:
    known = troubles.get(name) or _plain(snapshot, name, rows.get(name, {}))
    above |= {name}
    known.waiting = [
        _tree(snapshot, rows, {}, edges, other, above)
        for other, targets in edges.items()
        if name in targets and other not in above
    ]
    return known


def _edges(
    snapshot: Snapshot, rows: Mapping[str, Row], troubles: Mapping[str, Wait]
) -> Iterator[tuple[str, list[str]]]:
    """(who, for whom), where that is a wait worth telling."""
    said = {name: _waits_for(row) for name, row in rows.items() if _lives(row)}
    for name, targets in said.items():
        since = values.number(rows[name].get("waiting_since"))
        if name in troubles or since is None or snapshot.now - since < WAIT_S:
            continue
        grave = [target for target in targets if target in troubles or said.get(target)]
        if grave:
            yield name, grave
        elif targets and not _gets_on(rows[name]):
            yield name, targets


def _waits_for(row: Row) -> list[str]:
    text = row.get("waiting_for")
    return _NAME.findall(text) if isinstance(text, str) else []


def _lives(row: Row) -> bool:
    return row.get("state") in ("starting", "running", "slow", "draining")


def _gets_on(row: Row) -> bool:
    """Whether this is a worker that makes steps."""
    return row.get("role") == "worker" and bool(
        values.number(report.metrics(row).get("samples_per_s"))
    )


def _coordinator_well(snapshot: Snapshot) -> bool:
    return snapshot.stale_s is None and processes.is_alive(
        snapshot.run.get("pid"), snapshot.run.get("pid_created")
    )


# ---------------------------------------------------------------- what is wrong with whom


def _plain(snapshot: Snapshot, name: str, row: Row) -> Wait:
    """A daemon that others wait for, or that waits itself."""
    since = values.number(row.get("waiting_since"))
    what = str(row.get("phase") or row.get("state") or "nothing is known of it")
    job = f"-j {snapshot.run_id}"
    return Wait(name, what, since, f"dlctl logs {name} {job}", _stale_s(snapshot, row))


def _stale_s(snapshot: Snapshot, row: Row) -> float | None:
    heard_at = values.number(row.get("updated_at"))
    if heard_at is None or row.get("state") in (*ENDED, "backoff", "quarantined"):
        return None
    return age if (age := snapshot.now - heard_at) > STALE_AFTER_S else None


def _troubles(snapshot: Snapshot, rows: Mapping[str, Row]) -> dict[str, Wait]:
    """Daemons that are a cause of their own."""
    found = {}
    if not _coordinator_well(snapshot) and snapshot.run.get("pid") is not None:
        found[COORDINATOR] = _coordinator(snapshot)
    for name, row in rows.items():
        trouble = _trouble(snapshot, name, row)
        if trouble is not None:
            found[name] = trouble
    return found


def _coordinator(snapshot: Snapshot) -> Wait:
    since = values.number(snapshot.run.get("updated_at"))
    job = f"-j {snapshot.run_id}"
    if snapshot.state == "recovering" or "coordinator is gone" in snapshot.reason:
        what = "it has died, and its agent starts it again"
        return Wait(COORDINATOR, what, since, f"dlctl recover {job}, if that does not end")
    if snapshot.stale_s is None:
        what = "it has died"
        return Wait(COORDINATOR, what, since, f"dlctl recover {job}")
    what = "its process is there and says nothing"
    return Wait(COORDINATOR, what, since, f"dlctl logs coordinator {job}", snapshot.stale_s)


def _trouble(snapshot: Snapshot, name: str, row: Row) -> Wait | None:
    state, job = row.get("state"), f"-j {snapshot.run_id}"
    ended = _ended(row)
    at = values.number(row["last_exit"].get("at")) if ended else None
    stale_s = _stale_s(snapshot, row)
    if state == "quarantined":
        why = str(row.get("error") or ended or "it computes nothing that can be used")
        return Wait(name, f"quarantined: {why}", at, f"dlctl restart {name} {job}")
    if state in ("failed", "unknown"):
        what = f"gone: {ended}" if ended else "gone"
        return Wait(name, what, at, f"dlctl logs {name} {job}")
    if state == "backoff":
        retry_at = values.number(row.get("retry_at"))
        left_s = 0.0 if retry_at is None else retry_at - snapshot.now
        left = f" in {values.duration(left_s)}" if left_s > 0 else ""
        text = f"it is started again{left}: {ended or 'it has died'}"
        return Wait(name, text, at, f"dlctl logs {name} --previous {job}")
    if state == "slow":
        heard_at = values.number(row.get("updated_at"))
        phase = str(row.get("phase") or "silent")
        text = f"slow: {phase}" if stale_s is None else f"silent; it was last {phase}"
        return Wait(name, text, heard_at, f"dlctl restart {name} {job}", stale_s)
    if state == "starting" and not _waits_for(row):
        began = values.number(row.get("started_at"))
        text = f"it starts: {row.get('phase') or 'starting'}"
        return Wait(name, text, began, f"dlctl logs {name} {job}", stale_s)
    if state == "draining":
        text = f"it leaves: {row.get('phase') or 'draining'}"
        return Wait(name, text, None, f"dlctl logs {name} {job}", stale_s)
    return None


def _ended(row: Row) -> str:
    last = row.get("last_exit")
    return report.exited(last) if isinstance(last, Mapping) else ""


# ---------------------------------------------------------------- limits, and the run itself


def _limits(snapshot: Snapshot) -> list[Wait]:
    """Limits that somebody has set and that hold workers back, each with all of its workers."""
    found: dict[tuple[str, str], Wait] = {}
    for row in snapshot.daemons:
        for direction in ("push", "fetch"):
            limit = _limit(row, direction)
            rate = values.number(report.metrics(row).get(f"{direction}_bytes_per_s"))
            if limit is None or rate is None or rate < AT_LIMIT * limit:
                continue
            shown = settings.format_value(direction, limit)
            what = f"the limit {direction}={shown} is reached"
            wait = found.setdefault((direction, shown), Wait(f"{direction} limit", what, None))
            wait.waiting.append(Wait(str(row["name"]), f"{direction}es {values.rate(rate)}", None))
    for (direction, _), wait in found.items():
        names = " ".join(other.name for other in wait.waiting)
        wait.next = f"dlctl set {names} {direction}=off -j {snapshot.run_id}"
    return list(found.values())


def _limit(row: Row, direction: str) -> float | None:
    limit = report.settings(row).get(direction)
    if isinstance(limit, str):
        try:
            limit = settings.parse(direction, limit)
        except UsageError:
            return None
    return values.number(limit)


def _run_itself(snapshot: Snapshot, found: Sequence[Wait]) -> list[Wait]:
    """What the coordinator says of the run as a whole, unless that is told already."""
    text = snapshot.run.get("waiting")
    if not isinstance(text, str) or not text:
        return []
    named = set(_NAME.findall(text))
    told = {name for wait in found for name in wait.names()}
    if named and named <= told:
        return []
    first = next(iter(sorted(named)), COORDINATOR)
    command = f"dlctl logs {first} -j {snapshot.run_id}"
    return [Wait("the run", f"it waits for {text}", None, command)]
