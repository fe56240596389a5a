"""Who is not well, and who waits for whom. Found anew whenever the status is written, and written
with it: nobody else has to guess from rows what the coordinator knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dlctl import problems
from dlctl.messages import Json
from dlctl.problems import Code, Fact, Problem, known, names_in
from dlctl.roles.coordinator import daemon_states
from dlctl.roles.coordinator.failure_detector import SLOW_S_MAX
from dlctl.roles.coordinator.membership import Daemon, Membership
from dlctl.roles.coordinator.run_state import RunState
from dlctl.util import values
from dlctl.util.names import COORDINATOR, NO_ROOM
from dlctl.util.text import ALIKE_LIFE_S, KILLED, bounded_place

QUIET_S = 2.5
"""Daemons report once a second: one that has not for longer is late."""
RECENT_S = 60.0
"""A daemon that has taken another one's place is shown for so long."""
WAIT_S = 2.0
"""Shorter waits are answers on their way."""
OVERDUE_S = 10.0
"""A checkpoint that takes longer is late."""
AT_LIMIT = 0.8
"""Of a rate limit: whoever comes so close to it is held back by it."""


def find(run: RunState, row: Json, now: float) -> list[Problem]:
    """All problems of a run; `row` has its keys, as `status` shows them."""
    members, waiting = run.members, str(row.get("waiting") or "")
    found = list(_of_run(run, row, now))
    if run.reason != KILLED:  # Or that they have ended was asked for.
        daemons = members.daemons.values()
        limit_s = run.job.timeouts.silent_s
        found += [p for d in daemons if (p := _of_daemon(members, d, limit_s, now)) is not None]
    ill = {problem.daemon for problem in found if problem.code != "daemon-restarted"}
    found += _waits(members, ill, names_in(waiting), now)
    found += [*_limits(members.of_role("worker")), *_intervals(members.of_role("worker"))]
    told = {problem.daemon for problem in found}
    if waiting and not (told and told >= set(names_in(waiting))):
        found.append(Problem("run-waiting", problems.RUN, None, {"waiting": waiting}))
    return found


def _of_run(run: RunState, row: Json, now: float) -> Iterator[Problem]:
    if unwritten := run.context.unwritten:
        yield Problem("coordinator-unwritable", COORDINATOR, None, {"why": unwritten})
    if error := row.get("checkpoint_error"):
        yield Problem("checkpoint-failed", problems.RUN, None, {"error": error})
    saving = row.get("saving")
    if saving is not None and now - saving["at"] > OVERDUE_S:
        late = known(waiting=saving["waiting"], gives_up_at=saving["gives_up_at"])
        yield Problem("checkpoint-late", problems.RUN, saving["at"], late)
    if why := row.get("target_error"):
        yield Problem("target-unreachable", problems.RUN, None, {"why": why})
    ending = run.shutdown.state if run.shutdown is not None else run.state
    if ending == "failed":
        facts = known(reason=run.reason, **problems.of_reason(run.reason))
        yield Problem("run-failed", problems.RUN, None, facts)


# ---------------------------------------------------------------- one daemon


def _of_daemon(members: Membership, daemon: Daemon, limit_s: float, now: float) -> Problem | None:
    """What is wrong with it, or why it does not work yet; None if all is well."""
    silent_s, is_away = now - daemon.heard_at, members.agent_of(daemon).given_up_at is not None
    if is_away and daemon.role == "agent" and daemon.state != daemon_states.FAILED:
        return _unreachable_host(members, daemon)
    match daemon.state:
        case daemon_states.QUARANTINED | daemon_states.FAILED | daemon_states.BACKOFF:
            return _of_ended(members, daemon)
        case daemon_states.RUNNING | daemon_states.SLOW if daemon.stuck and silent_s < SLOW_S_MAX:
            return _stuck(members, daemon)
        case daemon_states.SLOW if is_away:
            return _problem("daemon-unreachable", daemon, daemon.heard_at)
        case daemon_states.RUNNING | daemon_states.SLOW if silent_s > QUIET_S:
            facts: dict[str, Fact | None] = {"limit_s": limit_s, "phase": daemon.phase}
            return _problem("heartbeat-late", daemon, daemon.heard_at, facts)
        case daemon_states.RUNNING | daemon_states.SLOW:
            return _of_restarted(members, daemon, now) or _of_long_batch(daemon)
        case daemon_states.STARTING if daemon.phase == NO_ROOM:
            return _problem("disk-full", daemon, daemon.started_at, {"phase": daemon.phase})
        case daemon_states.STARTING if _has_failed(daemon.last_exit):
            return _of_ended(members, daemon)
        case daemon_states.STARTING if not names_in(daemon.waiting_for):
            return _problem("daemon-starting", daemon, daemon.started_at, {"phase": daemon.phase})
        case daemon_states.DRAINING:
            return _problem("daemon-leaving", daemon, None, {"phase": daemon.phase})
    return None


def _problem(
    code: Code,
    daemon: Daemon,
    since: float | None,
    facts: Mapping[str, Fact | None] = MappingProxyType({}),
) -> Problem:
    found = {"incarnation": daemon.incarnation, **facts}
    if found.get("phase") == daemon.state:  # It says no more than the code does.
        del found["phase"]
    return Problem(code, daemon.name, since, known(**found))


def _unreachable_host(members: Membership, agent: Daemon) -> Problem:
    servers = ", ".join(d.name for d in members.hosted_by(agent) if d.role == "server")
    facts = {"host": agent.host, "given_up_at": agent.given_up_at, "servers": servers}
    return _problem("host-unreachable", agent, agent.heard_at, facts)


def _stuck(members: Membership, worker: Daemon) -> Problem:
    """If others are at the same line, or there are none, that line has to be corrected: the next
    processes would come to it, too.
    """
    workers, place = members.of_role("worker"), _place(worker)
    there = [other.name for other in workers if _place(other) == place]
    since = worker.reported_at - _number(worker.metrics, "stuck_s")
    facts: dict[str, Fact] = {"phase": worker.phase, "place": place}
    if place and (len(there) > 1 or len(workers) == 1):
        facts |= _by_task(there, workers)
    return _problem("worker-stuck", worker, since, facts)


def _of_long_batch(worker: Daemon) -> Problem | None:
    """A batch that takes longer than usual is no fault yet."""
    if not (long_s := _number(worker.metrics, "in_batch_s")):
        return None
    return _problem("batch-late", worker, worker.reported_at - long_s)


def _place(worker: Daemon) -> str:
    place = worker.metrics.get("stuck_at") if worker.stuck else None
    return bounded_place(place) if isinstance(place, str) else ""


def _by_task(names: Iterable[str], workers: Iterable[Daemon]) -> dict[str, Fact]:
    return {"cause": "task", "restart": problems.restart(names, (d.name for d in workers))}


# ---------------------------------------------------------------- a process that has ended


_OF_ENDED: Mapping[str, Code] = {
    daemon_states.QUARANTINED: "daemon-quarantined",
    daemon_states.FAILED: "daemon-failed",
    daemon_states.BACKOFF: "daemon-restarting",
    daemon_states.STARTING: "daemon-restarting",
}


def _of_ended(members: Membership, daemon: Daemon) -> Problem:
    code = _OF_ENDED[daemon.state]
    if code == "daemon-restarting" and _in_row(daemon):
        code = "worker-crash-loop"
    return _end(code, members, daemon)


def _of_restarted(members: Membership, daemon: Daemon, now: float) -> Problem | None:
    """Of a daemon that is at work: that the process before it has ended badly, for a while."""
    last = daemon.last_exit
    if last is None or not _has_failed(last):
        return None
    loops = _in_row(daemon) is not None
    if now - last["at"] > (ALIKE_LIFE_S if loops else RECENT_S):
        return None
    return _end("worker-crash-loop" if loops else "daemon-restarted", members, daemon)


def _end(code: Code, members: Membership, daemon: Daemon) -> Problem:
    """A problem with how the last process ended."""
    last, is_next = daemon.last_exit or {}, daemon.alive
    cause = problems.cause_in(daemon.error) or ("task" if _is_of_task(daemon) else "")
    facts: dict[str, Fact | None] = {
        "exit": last.get("text"),
        "in_row": _in_row(daemon),
        "error": daemon.error,
        "cause": cause,
        "retry_at": daemon.retry_at,
        "restarts": daemon.restarts or None,
        "phase": daemon.phase if daemon.state == daemon_states.STARTING else "",
        "incarnation": daemon.incarnation - is_next,
    }
    if cause == "task":
        workers = members.of_role("worker")
        facts |= _by_task((d.name for d in workers if _is_of_task(d)), workers)
    return _problem(code, daemon, last.get("at"), facts)


def _has_failed(last: Json | None) -> bool:
    """Whether a process has ended otherwise than it was told to."""
    return last is not None and bool(last.get("code") or last.get("in_row"))


def _in_row(daemon: Daemon) -> int | None:
    """How often in a row its processes have ended by themselves in the same way; None if once."""
    number = (daemon.last_exit or {}).get("in_row")
    return number if type(number) is int and number > 1 else None


def _is_of_task(daemon: Daemon) -> bool:
    return (daemon.last_exit or {}).get("cause") == "task"


# ---------------------------------------------------------------- waiting


def _waits(
    members: Membership, ill: set[str], held: Sequence[str], now: float
) -> Iterator[Problem]:
    """Waits that are worth a line, and the daemons that are well and that others wait for."""
    waits = dict(_edges(members, ill, held, now))
    slow: dict[str, float] = {}
    for name, targets in waits.items():
        daemon = members.daemons[name]
        since = daemon.waiting_since or now
        facts = {"phase": daemon.phase, "waiting_for": ", ".join(targets)}
        yield _problem("daemon-waiting", daemon, since, facts)
        for target in targets:
            if target not in ill and target not in waits:
                slow[target] = min(since, slow.get(target, since))
    for name, since in slow.items():
        waited_for = members.daemons.get(name)
        phase = waited_for.phase if waited_for is not None else ""
        yield Problem("daemon-slow", name, since, known(phase=phase))


def _edges(
    members: Membership, ill: set[str], held: Sequence[str], now: float
) -> Iterator[tuple[str, list[str]]]:
    """(who, for whom). A wait for a daemon that is well, by one that gets its answers, is the
    ordinary way of a message and is left out.

    held: whom the run as a whole waits for; whoever waits for the coordinator waits for these.
    """
    daemons = members.daemons.values()
    waits = {d.name: _whom(d, held) for d in daemons if d.alive and d.waiting_for}
    for name, targets in waits.items():
        daemon = members.daemons[name]
        since = daemon.waiting_since
        if name in ill or since is None or now - since < WAIT_S:
            continue
        serious = [target for target in targets if target in ill or target in waits]
        if serious or not daemon.metrics.get("samples_per_s"):
            yield name, serious or targets


def _whom(daemon: Daemon, held: Sequence[str]) -> list[str]:
    targets = names_in(daemon.waiting_for)
    is_held = targets == [COORDINATOR] and held and daemon.name not in held
    return list(held) if is_held else targets


def _limits(workers: Iterable[Daemon]) -> Iterator[Problem]:
    """Rate limits that hold workers back, each with all of its workers."""
    found: dict[tuple[str, float], list[tuple[Daemon, float]]] = {}
    for worker in workers:
        settings = worker.metrics.get("settings")
        for direction in ("push", "fetch"):
            limit = _number(settings, direction)
            if limit and _number(worker.metrics, f"{direction}_bytes_per_s") >= AT_LIMIT * limit:
                waits = _number(worker.metrics, f"{direction}_waiting_bytes")
                found.setdefault((direction, limit), []).append((worker, waits))
    for (direction, limit), held in found.items():
        facts: dict[str, Fact] = {
            "direction": direction,
            "limit_bytes_per_s": limit,
            "workers": ", ".join(worker.name for worker, _ in held),
        }
        if waiting := sum(waits for _, waits in held):
            facts["waiting_bytes"] = waiting
        yield Problem("rate-limit", problems.RUN, None, facts)


def _intervals(workers: Iterable[Daemon]) -> Iterator[Problem]:
    """Workers whose link needs longer intervals than "auto" may choose."""
    found: dict[tuple[str, int], list[str]] = {}
    for worker in workers:
        bound = worker.metrics.get("bound")
        for key, steps in bound.items() if isinstance(bound, Mapping) else ():
            if type(steps) is int:
                found.setdefault((str(key), steps), []).append(worker.name)
    for (key, steps), names in found.items():
        facts: dict[str, Fact] = {"key": key, "steps": steps, "workers": ", ".join(names)}
        yield Problem("interval-at-limit", problems.RUN, None, facts)


def _number(metrics: Any, key: str) -> float:
    """A figure that a daemon has reported; 0 if it has not."""
    return values.number(metrics.get(key)) or 0.0 if isinstance(metrics, Mapping) else 0.0
