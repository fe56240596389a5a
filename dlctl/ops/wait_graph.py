"""Who waits for whom in a run, and what all of it comes down to: a forest, root causes first.

The daemons say themselves whom they wait for; troubles, limits and the run's own word are added. A
wait for a daemon that is well, by one that gets its answers, is the ordinary way of a message and
is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlctl.errors import UsageError
from dlctl.ops import codes, disk, problems
from dlctl.runs import facts
from dlctl.runs.snapshot import ENDED, STALE_AFTER_S, Snapshot
from dlctl.settings import EVERY_RUN
from dlctl.util import values
from dlctl.util.names import COORDINATOR

WAIT_S = 2.0
"""Shorter waits are answers on their way."""
AT_LIMIT = 0.8
"""Of a limit: whoever comes so close to it is held back by it."""
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
    code: codes.Name = "daemon-slow"
    """See `dlctl.ops.codes`."""
    is_sentence: bool = False
    """`what` goes on a sentence that begins with the name, and says since when by itself."""

    def names(self) -> Iterator[str]:
        """Its own name and those of all who wait for it."""
        yield self.name
        for wait in self.waiting:
            yield from wait.names()


def causes(snapshot: Snapshot) -> list[Wait]:
    """The root causes of all waiting; [] if nobody waits.

    Without its coordinator nobody knows more of a run than that: sooner or later all wait for it.
    Nor does anybody as long as it cannot write, although nobody waits for it then.
    """
    rows = {str(row["name"]): row for row in snapshot.daemons}
    known = _troubles(snapshot, rows)
    if COORDINATOR in known:
        alone = known[COORDINATOR]
        return [alone if snapshot.unwritten_s is not None else _alone(snapshot, alone)]
    edges = dict(_edges(snapshot, rows, known))
    roots = [name for name in _targets(edges) if name not in edges]
    roots += [name for name in known if name not in roots and name not in edges]
    roots.sort(key=lambda name: name not in known)
    ring = [] if roots else list(edges)[:1]
    found = [_tree(snapshot, rows, known, edges, name, frozenset()) for name in roots + ring]
    found += [*_limits(snapshot), *_disk(snapshot)]
    return [*found, *_run_itself(snapshot, found)]


def _alone(snapshot: Snapshot, wait: Wait) -> Wait:
    """The coordinator, with all who are there without it."""
    there = problems.still_there(snapshot)
    wait.waiting = [Wait(str(row["name"]), "it is still there", None) for row in there]
    return wait


def _targets(edges: Mapping[str, Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(target for targets in edges.values() for target in targets))


def _tree(
    snapshot: Snapshot,
    rows: Mapping[str, Row],
    known: Mapping[str, Wait],
    edges: Mapping[str, Sequence[str]],
    name: str,
    above: frozenset[str],
) -> Wait:
    wait = known.get(name) or _plain(snapshot, name, rows.get(name) or snapshot.daemon(name))
    above |= {name}
    wait.waiting = [
        _tree(snapshot, rows, {}, edges, other, above)
        for other, targets in edges.items()
        if name in targets and other not in above
    ]
    return wait


def _edges(
    snapshot: Snapshot, rows: Mapping[str, Row], known: Mapping[str, Wait]
) -> Iterator[tuple[str, list[str]]]:
    """(who, for whom), where that is a wait worth telling."""
    held = _named(snapshot.run.get("waiting"))
    said = {name: _whom(name, row, held) for name, row in rows.items() if _lives(row)}
    for name, targets in said.items():
        since = values.number(rows[name].get("waiting_since"))
        if name in known or since is None or snapshot.now - since < WAIT_S:
            continue
        grave = [target for target in targets if target in known or said.get(target)]
        if grave:
            yield name, grave
        elif targets and not _gets_on(rows[name]):
            yield name, targets


def _whom(name: str, row: Row, held: Sequence[str]) -> list[str]:
    """Whom it waits for. If the coordinator keeps it waiting because of somebody else, for those.

    `held`: whom the run as a whole waits for.
    """
    targets = _waits_for(row)
    if targets != [COORDINATOR] or not held or name in held:
        return targets
    return list(held)


def _waits_for(row: Row) -> list[str]:
    return _named(row.get("waiting_for"))


def _named(text: Any) -> list[str]:
    return _NAME.findall(text) if isinstance(text, str) else []


def _lives(row: Row) -> bool:
    return row.get("state") in ("starting", "running", "slow", "draining")


def _gets_on(row: Row) -> bool:
    """Whether this is a worker that makes steps."""
    return row.get("role") == "worker" and bool(
        values.number(facts.metrics(row).get("samples_per_s"))
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
    known = [problem for problem in problems.found(snapshot) if not problem.is_over]
    found = {
        problem.daemon: Wait(
            problem.daemon,
            problem.text,
            problem.since,
            problem.fix,
            code=problem.code,
            is_sentence=True,
        )
        for problem in known
    }
    for name, row in rows.items():
        problem = _on_its_way(snapshot, name, row)
        if name not in found and problem is not None:
            found[name] = problem
    return found


def _on_its_way(snapshot: Snapshot, name: str, row: Row) -> Wait | None:
    """A daemon that is well and makes others wait: it comes, or it leaves."""
    state, stale_s = row.get("state"), _stale_s(snapshot, row)
    logs = f"dlctl logs {name} -j {snapshot.run_id}"
    if state == "starting" and not _waits_for(row):
        text = f"it starts: {row.get('phase') or 'starting'}"
        since = values.number(row.get("started_at"))
        return Wait(name, text, since, logs, stale_s, code="daemon-starting")
    if state == "draining":
        text = f"it leaves: {row.get('phase') or 'draining'}"
        return Wait(name, text, None, logs, stale_s, code="daemon-leaving")
    return None


# ---------------------------------------------------------------- limits, and the run itself


def _limits(snapshot: Snapshot) -> list[Wait]:
    """Limits that somebody has set and that hold workers back, each with all of its workers."""
    found: dict[tuple[str, float], Wait] = {}
    waiting_bytes: Counter[tuple[str, float]] = Counter()
    for row in snapshot.daemons:
        for direction in ("push", "fetch"):
            limit = _limit(row, direction)
            rate = values.number(facts.metrics(row).get(f"{direction}_bytes_per_s"))
            if limit is None or rate is None or rate < AT_LIMIT * limit:
                continue
            wait = found.setdefault(
                (direction, limit), Wait(f"{direction} limit", "", None, code="rate-limit")
            )
            wait.waiting.append(Wait(str(row["name"]), f"{direction}es {values.rate(rate)}", None))
            held_back = values.number(facts.metrics(row).get(f"{direction}_waiting_bytes"))
            waiting_bytes[direction, limit] += int(held_back or 0)
    for (direction, limit), wait in found.items():
        shown, size = EVERY_RUN.format(direction, limit), waiting_bytes[direction, limit]
        held = f", with {values.size(size)} still to be {direction}ed" if size else ""
        wait.what = f"the limit of {shown} is what is waited for{held}; it can be raised"
        names = " ".join(other.name for other in wait.waiting)
        more = EVERY_RUN.format(direction, 2 * limit).replace(" ", "")
        wait.next = f"dlctl set {names} {direction}={more} -j {snapshot.run_id}"
    return list(found.values())


def _limit(row: Row, direction: str) -> float | None:
    limit = facts.settings(row).get(direction)
    if isinstance(limit, str):
        try:
            limit = EVERY_RUN.parse(direction, limit)
        except UsageError:
            return None
    return values.number(limit)


def _disk(snapshot: Snapshot) -> list[Wait]:
    """Nobody waits for it yet, but whoever dies now will."""
    full = disk.no_room(snapshot)
    return (
        [Wait("the disk", full, None, disk.make_room(snapshot), code="disk-full")] if full else []
    )


def _run_itself(snapshot: Snapshot, found: Sequence[Wait]) -> list[Wait]:
    """What the coordinator says of the run as a whole, unless that is told already."""
    text = snapshot.run.get("waiting")
    if not isinstance(text, str) or not text:
        return []
    named = set(_named(text))
    told = {name for wait in found for name in wait.names()}
    if named and named <= told:
        return []
    first = next(iter(sorted(named)), COORDINATOR)
    command = f"dlctl logs {first} -j {snapshot.run_id}"
    return [Wait("the run", f"it waits for {text}", None, command, code="run-waiting")]
