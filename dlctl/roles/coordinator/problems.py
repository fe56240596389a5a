"""Finds the problems of a run: unhealthy daemons, and which daemon waits for which. Computed and
written with every status, so that readers need not infer from rows what the coordinator knows.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dlctl import problems
from dlctl.problems import Code, Fact, Problem, known, names_in
from dlctl.roles.coordinator.members import daemon_states
from dlctl.roles.coordinator.members.membership import Daemon, Membership
from dlctl.roles.coordinator.run_state import RunState
from dlctl.roles.coordinator.shutdown import RunShutdown
from dlctl.roles.coordinator.supervision.failure_detector import SLOW_S_MAX
from dlctl.util import values
from dlctl.util.names import COORDINATOR, WAITS_FOR_DISK, WAITS_FOR_SPACE
from dlctl.util.text import ALIKE_LIFE_S, KILLED, bounded_place
from dlctl.wire.messages import Json

QUIET_S = 2.5
"""Daemons report once a second: without a report for longer than this they are late."""
RECENT_S = 60.0
"""How long a restarted daemon is shown."""
WAIT_S = 2.0
"""Shorter waits are answers in flight."""
OVERDUE_S = 10.0
"""A checkpoint that takes longer is late."""
STALLED_S = 10.0
"""A commit of a server that is under way for longer means that its disk hangs. The end of a run
waits for it only for seconds: then a disk that is slow is a problem at once."""
LOOKED_AT = 64
"""How many targets of a daemon's wait are inspected: in a large group all may wait for all."""
UPDATE_S_MAX = 600.0
"""An update that takes longer is reported."""
AT_LIMIT = 0.8
"""Fraction of a rate limit above which the limit is taken to hold a worker back."""


def find(run: RunState, row: Json, now: float) -> list[Problem]:
    """All problems of a run; `row` has its keys, as `status` shows them."""
    members, waiting = run.members, str(row.get("waiting") or "")
    found = list(_of_run(run, row, now))
    if run.reason != KILLED:  # After `stop --kill` all exits were requested.
        daemons = members.daemons.values()
        look = _Inspection(members, run.job.timeouts.silent_s, run.shutdown, now)
        found += [p for d in daemons if (p := look.at(d)) is not None]
    ill = {problem.daemon for problem in found if problem.code != "daemon-restarted"}
    if not run.lacking():
        found += _waits(members, ill, names_in(waiting), now)
    workers = members.of_role("worker")
    found += [*_limits(workers), *_intervals(workers), *_slow_updates(workers)]
    reported = {problem.daemon for problem in found}
    if waiting and not (reported and reported >= set(names_in(waiting))):
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
    for tracker, facts in run.context.untracked.items():
        since, why, dropped = facts["since"], facts["why"], facts["dropped"]
        trouble = known(tracker=tracker, why=why, dropped=dropped or None)
        yield Problem("tracker-failed", problems.RUN, float(since), trouble)
    if why := row.get("loss_noise"):
        yield Problem("loss-noisy", problems.RUN, None, {"why": why})
    if few := row.get("few_rounds"):
        yield Problem("rounds-few", problems.RUN, None, {"why": few})
    ending = run.shutdown.state if run.shutdown is not None else run.state
    if ending == "failed":
        facts = known(reason=run.reason, **problems.of_reason(run.reason))
        yield Problem("run-failed", problems.RUN, None, facts)


# ---------------------------------------------------------------- one daemon


class _Inspection:
    """One inspection of all daemons."""

    def __init__(
        self, members: Membership, limit_s: float, end: RunShutdown | None, now: float
    ) -> None:
        self.members = members
        self.limit_s = limit_s
        """Heartbeat timeout, after which a daemon is replaced."""
        self.end = end
        self.now = now
        workers = members.of_role("worker")
        self.workers = len(workers)
        self.of_task = [worker.name for worker in workers if _is_of_task(worker)]
        self.there: dict[str, list[str]] = {}
        """Line of the task -> the workers that are stuck there."""
        for worker in workers:
            if place := _place(worker):
                self.there.setdefault(place, []).append(worker.name)

    def at(self, daemon: Daemon) -> Problem | None:
        """What is wrong with a daemon, or why it is not ready yet; None if it is healthy."""
        silent_s = self.now - daemon.heard_at
        if daemon.key and not (daemon.stuck and silent_s < SLOW_S_MAX):
            return None  # That it comes and goes is an event.
        is_away = self.members.agent_of(daemon).given_up_at is not None
        if is_away and daemon.role == "agent" and daemon.state != daemon_states.FAILED:
            return self._unreachable_host(daemon)
        if daemon.waits_for_host:
            return None  # So is that, and `status` shows why.
        if daemon.alive and silent_s <= QUIET_S and (stalled := self._stalled(daemon)) is not None:
            return stalled
        match daemon.state:
            case daemon_states.QUARANTINED:
                return self._end("daemon-quarantined", daemon)
            case daemon_states.FAILED:
                return self._end("daemon-failed", daemon)
            case daemon_states.BACKOFF:
                return self._end("daemon-restarting", daemon)
            case daemon_states.RUNNING | daemon_states.SLOW if (
                daemon.stuck and silent_s < SLOW_S_MAX
            ):
                return self._stuck(daemon)
            case daemon_states.SLOW if is_away:
                return _problem("daemon-unreachable", daemon, daemon.heard_at)
            case daemon_states.RUNNING | daemon_states.SLOW if (
                silent_s > QUIET_S or daemon.state == daemon_states.SLOW
            ):
                since, limit_s = daemon.heard_at, self.limit_s
                return _problem(
                    "heartbeat-late", daemon, since, phase=daemon.phase, limit_s=limit_s
                )
            case daemon_states.RUNNING:
                return self._of_restarted(daemon) or _of_long_batch(daemon)
            case daemon_states.STARTING if daemon.phase == WAITS_FOR_SPACE:
                return _problem("disk-full", daemon, daemon.started_at, phase=daemon.phase)
            case daemon_states.STARTING if _has_failed(daemon.last_exit):
                return self._end("daemon-restarting", daemon)
            case daemon_states.STARTING if not names_in(daemon.waiting_for):
                return _problem("daemon-starting", daemon, daemon.started_at, phase=daemon.phase)
            case daemon_states.DRAINING:
                return _problem("daemon-leaving", daemon, None, phase=daemon.phase)
        return None

    def _unreachable_host(self, agent: Daemon) -> Problem:
        hosted = self.members.hosted_by(agent)
        servers = ", ".join(daemon.name for daemon in hosted if daemon.role == "server")
        return _problem(
            "host-unreachable", agent, agent.heard_at, host=agent.host,
            given_up_at=agent.given_up_at, servers=servers,
        )  # fmt: skip

    def _stalled(self, server: Daemon) -> Problem | None:
        """A server whose disk hangs."""
        wait_s = _number(server.metrics, "commit_wait_s")
        end = self.end
        if server.phase != WAITS_FOR_DISK or (end is None and wait_s <= STALLED_S):
            return None
        place = _text(server.metrics, "commit_place")
        return _problem(
            "disk-stalled", server, server.reported_at - wait_s,
            commits=int(_number(server.metrics, "commits")) or None,
            limit_s=STALLED_S if end is None else None,
            step=end.step if end is not None else "",
            gives_up_at=end.until if end is not None else None,
            cause="disk" if place else "",
            folder=shlex.quote(place) if place else "",
        )  # fmt: skip

    def _stuck(self, worker: Daemon) -> Problem:
        """The problem of a worker stuck in one batch. If other workers are stuck at the same line,
        or there are none, the task has to be fixed: restarted processes would get stuck there, too.
        """
        place = _place(worker)
        there = self.there.get(place, [])
        since = worker.reported_at - _number(worker.metrics, "stuck_s")
        is_of_task = there and (len(there) > 1 or self.workers == 1)
        return _problem(
            "worker-stuck", worker, since, phase=worker.phase, place=place,
            cause="task" if is_of_task else "",
            restart=problems.restart(there, self.workers) if is_of_task else "",
        )  # fmt: skip

    def _of_restarted(self, daemon: Daemon) -> Problem | None:
        """For a while after a restart: the problem that the previous process has failed."""
        last, shown_s = daemon.last_exit, ALIKE_LIFE_S if _in_row(daemon) else RECENT_S
        if last is None or not _has_failed(last) or self.now - last["at"] > shown_s:
            return None
        return self._end("daemon-restarted", daemon)

    def _end(self, code: Code, daemon: Daemon) -> Problem:
        """A problem with how the last process ended."""
        last, is_next = daemon.last_exit or {}, daemon.alive
        if _in_row(daemon) and code in ("daemon-restarting", "daemon-restarted"):
            code = "worker-crash-loop"
        cause = problems.cause_in(daemon.error) or str(last.get("cause") or "")
        chosen = (self.of_task or [daemon.name]) if cause == "task" else []
        return _problem(
            code, daemon, last.get("at"),
            exit=last.get("text"),
            in_row=_in_row(daemon),
            error=daemon.error,
            cause=cause,
            retry_at=daemon.retry_at,
            restarts=daemon.restarts or None,
            phase=daemon.phase if daemon.state == daemon_states.STARTING else "",
            incarnation=daemon.incarnation - is_next,
            restart=problems.restart(chosen, self.workers),
        )  # fmt: skip


def _problem(code: Code, daemon: Daemon, since: float | None, **facts: Fact | None) -> Problem:
    facts = {"incarnation": daemon.incarnation, **facts}
    if facts.get("phase") == daemon.state:  # Redundant: the code says the same.
        del facts["phase"]
    return Problem(code, daemon.name, since, known(**facts))


def _of_long_batch(worker: Daemon) -> Problem | None:
    """A batch that takes longer than usual; not a failure yet."""
    if not (long_s := _number(worker.metrics, "in_batch_s")):
        return None
    return _problem("batch-late", worker, worker.reported_at - long_s)


def _place(worker: Daemon) -> str:
    return _text(worker.metrics, "stuck_at") if worker.stuck else ""


def _text(metrics: Mapping[str, Any], key: str) -> str:
    """A place that a daemon has reported; "" if it has not."""
    place = metrics.get(key)
    return bounded_place(place) if isinstance(place, str) else ""


def _has_failed(last: Json | None) -> bool:
    """Whether a process has exited other than as requested."""
    return last is not None and bool(last.get("code") or last.get("in_row"))


def _in_row(daemon: Daemon) -> int | None:
    """How often in a row a daemon's processes have exited on their own alike; None if once."""
    number = (daemon.last_exit or {}).get("in_row")
    return number if type(number) is int and number > 1 else None


def _is_of_task(daemon: Daemon) -> bool:
    return (daemon.last_exit or {}).get("cause") == "task"


# ---------------------------------------------------------------- waiting


def _waits(
    members: Membership, ill: set[str], held: Sequence[str], now: float
) -> Iterator[Problem]:
    """Waits that are worth a line, and the healthy daemons that others wait for. A daemon that
    makes progress and waits for a healthy one has ordinary messages in flight, and is left out.

    held: daemons that the run as a whole waits for; to wait for the coordinator is to wait for
    these.
    """
    daemons = members.daemons.values()
    waits = {d.name: _waiting_for(d, held) for d in daemons if d.alive and d.waiting_for}
    worth: dict[str, list[str]] = {}
    slow: dict[str, float] = {}
    for name, targets in waits.items():
        daemon = members.daemons[name]
        since = daemon.waiting_since
        if name in ill or since is None or now - since < WAIT_S:
            continue
        serious = sorted((t for t in targets if t in ill or t in waits), key=lambda t: t not in ill)
        if serious or not daemon.metrics.get("samples_per_s"):
            worth[name] = serious or targets
    for name, targets in worth.items():
        daemon = members.daemons[name]
        since = daemon.waiting_since or now
        shown = ", ".join(targets[: problems.NAMED_MAX])
        yield _problem("daemon-waiting", daemon, since, phase=daemon.phase, waiting_for=shown)
        for target in targets:
            if target not in ill and target not in worth:
                slow[target] = min(since, slow.get(target, since))
    for name, since in slow.items():
        waited_for = members.daemons.get(name)
        phase = waited_for.phase if waited_for is not None else ""
        yield Problem("daemon-slow", name, since, known(phase=phase))


def _waiting_for(daemon: Daemon, held: Sequence[str]) -> list[str]:
    targets = names_in(daemon.waiting_for, LOOKED_AT)
    is_held = targets == [COORDINATOR] and held and daemon.name not in held
    return list(held) if is_held else targets


def _limits(workers: Iterable[Daemon]) -> Iterator[Problem]:
    """Rate limits that hold workers back, each with its workers."""
    found: dict[tuple[str, float], list[tuple[Daemon, float]]] = {}
    for worker in workers:
        settings = worker.metrics.get("settings")
        for direction in ("push", "fetch"):
            limit = _number(settings, direction)
            if limit and _number(worker.metrics, f"{direction}_bytes_per_s") >= AT_LIMIT * limit:
                waits = _number(worker.metrics, f"{direction}_waiting_bytes")
                found.setdefault((direction, limit), []).append((worker, waits))
    for (direction, limit), held in found.items():
        facts = known(
            direction=direction,
            limit_bytes_per_s=limit,
            workers=", ".join(worker.name for worker, _ in held),
            waiting_bytes=sum(waits for _, waits in held) or None,
        )
        yield Problem("rate-limit", problems.RUN, None, facts)


def _intervals(workers: Iterable[Daemon]) -> Iterator[Problem]:
    """Workers whose link needs a longer interval than "auto" may choose."""
    found: dict[tuple[str, int], list[str]] = {}
    for worker in workers:
        bound = worker.metrics.get("bound")
        for key, steps in bound.items() if isinstance(bound, Mapping) else ():
            if type(steps) is int:
                found.setdefault((str(key), steps), []).append(worker.name)
    for (key, steps), names in found.items():
        facts: dict[str, Fact] = {"key": key, "steps": steps, "workers": ", ".join(names)}
        yield Problem("interval-at-limit", problems.RUN, None, facts)


def _slow_updates(workers: Iterable[Daemon]) -> Iterator[Problem]:
    """Replicas that find that all of them together need too long for one update."""
    reported = [_number(w.metrics.get("method"), "update_s") for w in workers if w.alive]
    longest = max(reported, default=0.0)
    if longest > UPDATE_S_MAX:
        yield Problem("update-slow", problems.RUN, None, {"update_s": longest})


def _number(metrics: Any, key: str) -> float:
    """A number that a daemon has reported; 0 if it has not."""
    return values.number(metrics.get(key)) or 0.0 if isinstance(metrics, Mapping) else 0.0
