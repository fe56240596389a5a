"""Detects daemons that miss heartbeats, die or fail, and decides what follows for the run.

Every daemon is restarted with backoff, up to a limit, and the others keep running. A worker's
portions are leased again; if a restart does not help it, it is quarantined. A server resumes from
the state that its predecessor left; without one (`durability = "none"`) its shard is lost, the run
ends, and can resume from its checkpoint. An agent adopts the daemons that run on its host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

from dlctl.errors import RemoteProtocolError
from dlctl.problems import are_alike
from dlctl.roles.coordinator.checkpointing import Checkpointing
from dlctl.roles.coordinator.evaluation import Evaluations
from dlctl.roles.coordinator.members import daemon_states
from dlctl.roles.coordinator.members.crash_loops import NO_ROOM, UNSAID, blame
from dlctl.roles.coordinator.members.membership import Daemon
from dlctl.roles.coordinator.members.selections import ByContact, Due
from dlctl.roles.coordinator.run_state import CoordinatorPart
from dlctl.roles.coordinator.supervision.guests import Guests
from dlctl.roles.coordinator.supervision.host_failures import HostFailures
from dlctl.roles.coordinator.supervision.scaling import REMOVAL, TAKEN, Scaling
from dlctl.roles.coordinator.training.frozen import FrozenParameters
from dlctl.roles.coordinator.training.leases import Leases
from dlctl.roles.protocol.context import EXIT_FENCED, EXIT_POISONED
from dlctl.roles.protocol.limits import STATUS_UNKNOWN
from dlctl.util.names import HOME_AGENT, WAITS_FOR_SPACE
from dlctl.util.text import ENDED_BY_ITSELF, HAS_LEFT, plural
from dlctl.wire import messages as m
from dlctl.wire.machine import Peer

DEATHS_MAX = 20
"""Deaths in a row of a server or an agent, each soon after its start: restarts do not help."""
UNSEEN_MAX = 10_000
"""How many incarnations an agent's report of a daemon may be ahead of our records."""
ERROR_CHARS_MAX = 4_000
"""Characters of a worker's error that are sent on and shown."""
EXIT_S = 5.0
"""Time from a worker's error until its process is killed; it exits on its own sooner."""
SLOW_S_MAX = 5.0
"""Upper bound of the time without a heartbeat after which a daemon's state is `slow`."""

_ERROR = "ERROR "


def last_error(status: int, last_lines: tuple[str, ...]) -> str:
    """The error that a daemon logged before it exited; "" if it was killed, or logged none.

    `last_lines`: the end of its log, "LEVEL text" each; traceback lines are unchanged.
    """
    errors = [line.removeprefix(_ERROR) for line in last_lines if line.startswith(_ERROR)]
    return errors[-1] if errors and status > 0 else ""


def _is_before_attach(daemon: Daemon) -> bool:
    """Of a daemon of a job with a training loop of the user's own."""
    return daemon.role == "worker" and daemon.pid is not None and not daemon.registered


def _text(daemon: Daemon) -> str:
    """How the daemon's last process ended, as a sentence."""
    assert daemon.last_exit is not None
    return str(daemon.last_exit["text"])


def _why(daemon: Daemon, cause: str) -> str:
    """Why a run fails without this daemon: the last error that it logged, if any."""
    return f"{daemon.name}: {cause}" if cause else f"{daemon.name} ended: {_text(daemon)}"


@dataclass(eq=False)
class FailureDetector(CoordinatorPart):
    leases: Leases
    evaluations: Evaluations
    checkpointing: Checkpointing
    frozen: FrozenParameters
    scaling: Scaling
    host_failures: HostFailures
    guests: Guests
    _checked_at: float = field(default=0.0, init=False)
    _was_cut_off: bool = field(default=False, init=False)
    script_at: float = field(default=0.0, init=False)
    """When a script was last running that had not called dlctl.attach."""

    def __post_init__(self) -> None:
        self.limit_s = self.run.job.timeouts.silent_s
        self.slow_s = min(SLOW_S_MAX, self.limit_s / 2)
        self._by_contact = ByContact[Daemon]()
        self.members.observe(self._by_contact)
        self._kills = Due[Daemon]("kill_at")
        self.members.observe(self._kills)
        self._starting = self.members.select(("_state",), lambda d: d.state == "starting")
        has_loop = self.run.job.has_loop
        self._scripts = self.members.select(
            ("_state", "registered", "pid"), lambda d: has_loop and _is_before_attach(d)
        )
        self._untouched = self.members.select(
            ("out_of_touch", "given_up_at"), lambda d: d.out_of_touch or d.given_up_at is not None
        )

    def deadline(self) -> float:
        """When to check next; `watch` takes a longer gap for a pause of the coordinator."""
        return self._checked_at + self.slow_s / 2

    def watch(self, now: float) -> None:
        was_paused = now - self._checked_at > self.slow_s
        is_cut_off = not was_paused and self._is_cut_off(now)
        if was_paused or (self._was_cut_off and not is_cut_off):
            # The coordinator itself was paused or starved, and heartbeats are still unread; or the
            # first heartbeat is back, and the other daemons need time to reconnect.
            for daemon in self.members.daemons.values():
                daemon.heard_at = now
        self._checked_at, self._was_cut_off = now, is_cut_off
        is_full = any(server.phase == WAITS_FOR_SPACE for server in self.members.of_role("server"))
        is_held_up = bool(self.context.unwritten) or is_full
        for worker in self._scripts:  # It imports, downloads ...: its agent watches the process.
            worker.held_up_at = self.script_at = now
        for daemon in self._to_watch(now):
            self._watch(daemon, now, is_cut_off)
        if is_held_up or self.run.released_at is not None:
            for daemon in self._starting:
                self._watch_start(daemon, now, is_held_up)
        for daemon in self._kills.by(now):
            if daemon.alive:
                daemon.kill_at = None
                self._kill(daemon, "did not leave in time", now)
        if self.evaluations.overdue(now):
            name = self.evaluations.worker
            self._kill(self.members.daemons[name], "its evaluation does not end", now)
            self.evaluations.gone(name)

    def _is_cut_off(self, now: float) -> bool:
        """Whether all daemons are silent: then the network or the coordinator itself is at fault.

        They do not all hang at once, and those that are alive keep training with the servers.
        """
        newest = self._by_contact.newest()
        heard = takewhile(lambda daemon: now - daemon.heard_at <= self.slow_s, newest)
        if any(daemon.alive and daemon.registered for daemon in heard):
            return False
        return sum(d.alive and d.registered for d in self.members.daemons.values()) > 1

    def _to_watch(self, now: float) -> list[Daemon]:
        """The daemons that are silent, or were out of touch."""
        late = self._by_contact.silent_for(self.slow_s, now)
        found = {daemon.name: daemon for daemon in (*late, *self._untouched)}
        return sorted(found.values(), key=lambda daemon: daemon.place)

    def _watch_start(self, daemon: Daemon, now: float, is_held_up: bool) -> None:
        """Kill a replacement that does not get ready. The first start has its own deadline.

        A replacement is not at fault while the database cannot be written (it, or a daemon that it
        waits for, gets no term then), or while a disk has no room for its state.
        """
        if daemon.registered and is_held_up:
            daemon.held_up_at = now
        ready_s, begun = self.run.job.timeouts.ready_s, daemon.started_at
        late = begun is not None and now - max(begun, daemon.held_up_at) > ready_s
        if late and daemon.state == "starting" and self.run.released_at is not None:
            daemon.started_at = now
            self._kill(daemon, f"not ready after {ready_s:.0f} s ({daemon.phase})", now)

    def _may_be_a_script_that_ends(self, daemon: Daemon) -> bool:
        """A script goes on when its worker has left: the shutdown's own limit applies to it."""
        shutdown = self.run.shutdown
        is_script = self.run.job.has_loop and daemon.role == "worker"
        return is_script and shutdown is not None and shutdown.is_shutting_down()

    def _kill(self, daemon: Daemon, why: str, now: float, **data: str) -> None:
        daemon.killed_for = f"killed: {why}"
        self.context.event("silent", daemon.name, f"{daemon.name}: {why}: it is killed", **data)
        self.context.kill(daemon, 9, now)

    def _watch(self, daemon: Daemon, now: float, is_cut_off: bool) -> None:
        """A daemon whose heartbeat is late is first `slow`, then killed; its exit is handled as
        any other.
        """
        silent_s = now - daemon.heard_at
        daemon.out_of_touch = daemon.role == "agent" and self.host_failures.is_away(daemon)
        if daemon.state == "running" and silent_s > self.slow_s:
            daemon.change_state(daemon_states.SLOW)
        if not daemon.alive or not daemon.registered or silent_s <= self.limit_s or is_cut_off:
            return
        if self.host_failures.is_away(daemon):
            # No agent can be reached to kill it, and it may be alive; stop waiting for it.
            daemon.out_of_touch = True
            if daemon.role == "worker":
                self.checkpointing.on_gone(daemon.name, now, lost="its host is unreachable")
                self.evaluations.gone(daemon.name)
            return
        if self.members.agent_of(daemon).killed_for:
            return  # The kill of its agent is in flight.
        if self._may_be_a_script_that_ends(daemon):
            return
        daemon.heard_at = now  # Once per limit.
        if daemon.role == "guest":
            daemon.killed_for = f"no heartbeat for {self.limit_s:.0f} s"
            self.presume_dead(daemon, now)
            return
        self._kill(daemon, f"no heartbeat for {self.limit_s:.0f} s", now, code="heartbeat-late")

    def compare(self, agent: Daemon, children: object, now: float) -> None:
        """Reconcile an agent's report of the daemons on its host with our records.

        Exits are reported one by one, and resent until acknowledged. This handles what no agent
        saw, daemons that died while no agent was running and daemons that are no longer needed; and
        what is not on record, processes that an earlier coordinator started while it could not
        write to the database.
        """
        if not isinstance(children, dict):
            return
        for name, incarnation in children.items():
            if not isinstance(incarnation, int):
                continue
            known = self.members.get(name)
            if known is not None and known.agent == agent.name:
                if known.incarnation == incarnation:
                    continue
                if self._catch_up(known, incarnation):
                    self.presume_dead(known, now)
            self.context.send(agent.name, m.Kill(name, incarnation, 9))
        for daemon in self.members.hosted_by(agent):
            is_old = daemon.agent_incarnation != agent.incarnation
            if not daemon.alive or daemon.pid is None or not is_old:
                continue
            daemon.agent_incarnation = agent.incarnation
            if children.get(daemon.name) != daemon.incarnation:
                self.presume_dead(daemon, now)

    def _catch_up(self, daemon: Daemon, incarnation: int) -> bool:
        """Whether its agent reports a newer process than the one on record.

        That process has no term: it is issued only once the process is on
        record. But its incarnation number is used.
        """
        newer = incarnation - daemon.incarnation
        if newer > UNSEEN_MAX:
            raise RemoteProtocolError(f"its incarnation is {newer} ahead of the one on record")
        daemon.incarnation = max(daemon.incarnation, incarnation)
        return newer > 0

    def on_exited(self, peer: Peer, message: m.ProcessExited, now: float) -> None:
        """An agent reports the exit of one of its daemons; resent until acknowledged.

        A report about a daemon that another agent has adopted is acknowledged and ignored.
        """
        daemon = self.members.get(message.name)
        if daemon is not None and self.members.agent_of(daemon).peer not in (peer, None):
            # If it is an agent at all, its next report identifies it.
            if not any(agent.peer == peer for agent in self.members.of_role("agent")):
                raise RemoteProtocolError("the sender is not the agent of this daemon")
            self.context.send(peer, m.ExitNoted(message.name, message.incarnation))
            return
        if daemon is not None:
            self._catch_up(daemon, message.incarnation)
        self.context.send(peer, m.ExitNoted(message.name, message.incarnation))
        self.on_exit(message, now)

    def presume_dead(self, daemon: Daemon, now: float) -> None:
        self.on_exit(m.ProcessExited(daemon.name, daemon.incarnation, STATUS_UNKNOWN, ()), now)

    def on_exit(self, end: m.ProcessExited, now: float) -> None:
        name = end.name
        daemon = self.members.get(name, end.incarnation)
        if daemon is None or not daemon.alive:
            return
        # A daemon that had not registered was sent SIGTERM, so this exit was requested.
        asked = end.status in (0, STATUS_UNKNOWN)
        asked |= end.status == -15 and ("kill", name) in self.context.retries
        planned = self.run.shutdown is not None and asked
        cause = last_error(end.status, end.last_lines)
        daemon.ended(end, now, cause, is_planned=planned)
        self._drop_requests(name)
        text = f"{name} ended: {_text(daemon)}{blame(daemon.last_exit or {})}"
        may_leave = daemon.key or daemon.leaving == TAKEN
        kind = "stop" if planned else "leave" if may_leave else "exit"
        last_lines = [] if planned else list(end.last_lines[-5:])
        if daemon.role != "agent" or not self.host_failures.is_away(daemon):
            self.context.event(kind, name, text, last_lines=last_lines, incarnation=end.incarnation)
        self.run.status_due_at = now
        self.checkpointing.on_gone(name, now)
        self.frozen.on_gone(name, now)
        self.evaluations.gone(name)
        if daemon.role == "guest":
            self.guests.lose(daemon, now)
            return
        if daemon.key and not (daemon.leaving and self.members.agent_of(daemon).alive):
            daemon.leaving = REMOVAL  # Its guest asks for the slot again, or not.
        if self.scaling.on_exit(daemon, now):
            return
        if daemon.role == "worker":
            self._lose_worker(daemon, end.status, cause, now)
        elif daemon.role == "server":
            self._lose_server(daemon, cause, now)
        else:
            self._lose_agent(daemon, end, cause, now)

    def _drop_requests(self, name: str) -> None:
        """Drop the pending requests that only this process could have answered."""
        moved = [f"moved{server.index}" for server in self.members.of_role("server")]
        for what in (
            "spawn",
            "assign",
            "allowed_peers",
            "bounds",
            "shutdown",
            "kill",
            "drain",
            "change",
            *moved,
        ):
            self.context.retries.drop((what, name))

    def _restart(self, daemon: Daemon, text: str, now: float) -> None:
        daemon.back_off(now)
        text = f"{daemon.name} {text}"
        self.context.event("lost", daemon.name, text, code="daemon-restarting")

    def _lose_server(self, server: Daemon, cause: str, now: float) -> None:
        """Its next process resumes with its state. Without one the run fails."""
        if self.run.shutdown is not None and not self.run.shutdown.needs_servers():
            return
        if self._has_state(server) and not self._is_hopeless(server, DEATHS_MAX):
            self._restart(server, "resumes with its state: nothing acknowledged is lost", now)
            return
        reason = _why(server, cause)
        if self.run.released_at is not None and self.run.keeps_shards():
            died = plural(server.deaths_in_row, "time")
            reason += f"; it has died {died} in a row, and the state of its shard is kept"
        elif self.run.released_at is not None:
            reason += "; its shard is lost"
        self.control.end("failed", reason, now)

    def _has_state(self, server: Daemon) -> bool:
        """Whether the next process of this shard can resume from its state."""
        assert server.last_exit is not None
        # A server that exited with an error before it ever served would do so again, unless it was
        # dismissed because its start was not on record.
        code = server.last_exit["code"]
        may_serve = server.has_served or code < 0 or code == EXIT_FENCED
        return self.run.keeps_shards() and may_serve and not server.error

    def _is_hopeless(self, daemon: Daemon, deaths_max: int) -> bool:
        """Whether restarts do not help. A full disk may be what its processes die of: it is waited
        for, however long that takes.
        """
        last_exit = daemon.last_exit or {}
        is_full = bool(self.context.unwritten) or NO_ROOM in str(last_exit.get("text"))
        return daemon.deaths_in_row > deaths_max and not is_full

    def _may_live(self, agent: Daemon, end: m.ProcessExited) -> bool:
        """Whether its next process may live, although this one may have exited with an error."""
        return end.status <= 0 or (agent.has_worked and bool(self.context.unwritten))

    def _lose_agent(self, agent: Daemon, end: m.ProcessExited, cause: str, now: float) -> None:
        """The next agent adopts the daemons that are alive, and reports those that are not."""
        if self.run.shutdown is not None and self.run.shutdown.is_leaving():
            return
        if end.status != STATUS_UNKNOWN:
            agent.waits_for_host = False  # It has ended by itself.
        if agent.name != HOME_AGENT and agent.has_worked:  # Then its host may come back.
            self.host_failures.lose(agent, end.last_lines, now)
        elif self._may_live(agent, end) and not self._is_hopeless(agent, DEATHS_MAX):
            self._restart(agent, "starts again; its daemons keep running", now)
        elif agent.has_worked:
            self.control.end("failed", f"{_why(agent, cause)}; its daemons are orphans", now)
        else:
            host = self.host_failures.host(agent)
            words = cause or (end.last_lines or (_text(agent),))[-1]
            self.control.end("failed", f"{agent.name} cannot be started on {host}: {words}", now)

    def _lose_worker(self, worker: Daemon, status: int, cause: str, now: float) -> None:
        """The others continue: its portions are leased again, barriers no longer count it."""
        portions = self.leases.gone(worker.index, now)
        self.control.notify_members()
        if self.run.shutdown is not None:
            is_hopeless = self._is_hopeless(worker, self.run.job.workers.restarts_max)
            is_helped = status != EXIT_POISONED and not worker.error and not is_hopeless
            if is_helped and self.run.shutdown.needs(worker):
                self._restart(worker, "starts again: the others may still ask it", now)
            return
        if status == EXIT_POISONED:
            self._quarantine(worker, cause, now)
        elif worker.error:
            self._quarantine(worker, worker.error, now)
        elif self._is_hopeless(worker, self.run.job.workers.restarts_max):
            self._give_up(worker, cause, now)
        else:
            again = f"; {plural(portions, 'portion')} of its data can be leased again"
            self._restart(worker, f"starts again{again if portions else ''}", now)

    def _give_up(self, worker: Daemon, cause: str, now: float) -> None:
        """Restarts do not help: the others continue without it. A run that waits for it to begin
        fails.
        """
        last = worker.last_exit or {}
        died = plural(worker.deaths_in_row, "time")
        words = f"it died {died} before or soon after it was ready: {_text(worker)}{blame(last)}"
        if last.get("text") == HAS_LEFT:
            words = f"{HAS_LEFT} {died} in a row without having trained"
        if last.get("had_lived") and last["in_row"] > 1:
            words = f"{ENDED_BY_ITSELF} ({_text(worker)}){blame(last)}"
            words = ": ".join(filter(None, (words, cause)))
        if self.run.released_at is None:
            self.control.end("failed", f"{worker.name}: {words}", now)
        else:
            self._quarantine(worker, words, now)

    def fail(self, worker: Daemon, error: str, now: float, detail: str = "") -> None:
        """A worker has an error that a restart would repeat. Nothing that it does counts any more;
        it is quarantined once its process has exited, and the others continue. If another worker
        has failed alike, or if no other is left, the task is at fault and the run ends; so does a
        run that waits for the worker to begin.
        """
        if worker.error:
            return  # It is repeated.
        worker.error = error[:ERROR_CHARS_MAX] or f"it failed {UNSAID}"
        self.context.event("error", worker.name, worker.error, detail=detail)
        if worker.key:  # The run goes on without it.
            self.context.send(worker.name, m.Dismiss(worker.error))
            worker.kill_at = now + EXIT_S
            return
        others = [other for other in self.members.of_role("worker") if other is not worker]
        alike = [w.name for w in others if w.error and are_alike(w.error, worker.error)]
        are_lost = all(w.error or w.state == daemon_states.QUARANTINED for w in others)
        if alike or are_lost or self.run.released_at is None:
            names = ", ".join([*alike, worker.name])
            self.control.end("failed", f"{names}: {worker.error}", now)
            return
        self.context.send(worker.name, m.Dismiss(worker.error))
        worker.kill_at = now + EXIT_S
        if self.run.is_working and self.evaluations.worker == worker.name:
            # If the task's `evaluate` is at fault, the next worker has the same error at once.
            self.evaluations.gone(worker.name)
            self.evaluations.begin(now)
        if self.run.is_working and not self.members.of_role("server"):
            # The model is in the workers, and the next ones may fail at the same data.
            self.control.begin_checkpoint(now)

    def _quarantine(self, worker: Daemon, error: str, now: float) -> None:
        worker.change_state(daemon_states.QUARANTINED)
        worker.error = error
        text = f"{worker.name} is quarantined: {worker.error}"
        self.context.event("quarantine", worker.name, text, code="daemon-quarantined")
        if reason := self.members.no_worker_left():
            self.control.end("failed", reason, now)

    def on_failed(self, peer: Peer, message: m.Failed, now: float) -> None:
        """A daemon reports the user's error, with the traceback in the user's code. Raises
        RemoteProtocolError for what no worker sends.
        """
        daemon = self.members.get(message.name)
        if daemon is None or daemon.peer != peer:
            return
        if daemon.role == "worker":
            if not message.fatal:
                raise RemoteProtocolError("the errors of workers are fatal")
            self.fail(daemon, message.error, now, message.detail)
            return
        if message.fatal:
            daemon.error = message.error
        self.context.event("error", message.name, message.error, detail=message.detail)
        if message.fatal:
            self.control.end("failed", f"{message.name}: {message.error}", now)
