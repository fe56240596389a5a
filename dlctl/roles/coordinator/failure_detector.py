"""Daemons whose heartbeats stop, that die or cannot go on; and what follows for the run.

Every daemon is replaced, with growing pauses and not for ever, and the others go on. A worker's
portions are leased again. A server goes on with the state that the one before it has left; where
there is none (`durability = "none"`) its shard is lost, the run ends, and can go on from its
checkpoint. An agent adopts the daemons that live on its host.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlctl import messages as m
from dlctl.errors import RemoteProtocolError
from dlctl.machine import Peer
from dlctl.messages import Json
from dlctl.roles.coordinator import daemon_states
from dlctl.roles.coordinator.checkpointing import Checkpointing
from dlctl.roles.coordinator.evaluation import Evaluations
from dlctl.roles.coordinator.frozen import FrozenParameters
from dlctl.roles.coordinator.host_failures import HostFailures
from dlctl.roles.coordinator.lease_scheduler import LeaseScheduler
from dlctl.roles.coordinator.membership import Daemon
from dlctl.roles.coordinator.run_state import Part
from dlctl.roles.coordinator.scaling import Scaling
from dlctl.roles.coordinator.settings import SettingChanges
from dlctl.roles.protocol.context import EXIT_FENCED, EXIT_POISONED
from dlctl.roles.protocol.effects import ProcessEnded
from dlctl.roles.protocol.limits import STATUS_UNKNOWN
from dlctl.util.names import NO_ROOM
from dlctl.util.text import ENDED_BY_ITSELF, plural

DEATHS_MAX = 20
"""Of a server or an agent in a row, each soon after its start: no restart mends that."""
UNSEEN_MAX = 10_000
"""Incarnations of a daemon that an agent may know of, and no coordinator that is left."""
SLOW_S_MAX = 5.0
"""Without a heartbeat, after which a daemon's state is `slow`; at the latest."""


_ERROR = "ERROR "
_BUG = 70


def last_error(status: int, last_lines: tuple[str, ...]) -> str:
    """What a daemon that gave up by itself said about it; "" if it was killed, or said nothing.

    `last_lines`: of its log, "LEVEL text" each, a traceback's lines as they are.
    """
    if status == _BUG and last_lines:
        return f"a bug in dlctl: {_end_of_error(last_lines)}"
    errors = [line.removeprefix(_ERROR) for line in last_lines if line.startswith(_ERROR)]
    return errors[-1] if errors and status > 0 else ""


def _end_of_error(last_lines: tuple[str, ...]) -> str:
    """The last line of its traceback: what the task's exit functions print comes after it."""
    errors = [number for number, line in enumerate(last_lines) if line.startswith(_ERROR)]
    for number in range(errors[-1] + 1 if errors else len(last_lines), len(last_lines)):
        if last_lines[number].startswith(("INFO ", "WARNING ")):
            return last_lines[number - 1]
    return last_lines[-1]


def in_full(last_exit: Json) -> str:
    """How a process ended, how often in a row, and whose doing that was, as far as it is known."""
    return f"{last_exit['text']}{last_exit.get('blame', '')}"


@dataclass(eq=False)
class FailureDetector(Part):
    scheduler: LeaseScheduler
    settings: SettingChanges
    evaluations: Evaluations
    checkpointing: Checkpointing
    frozen: FrozenParameters
    scaling: Scaling
    host_failures: HostFailures
    _looked_at: float = field(default=0.0, init=False)
    _was_cut_off: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.limit_s = self.run.job.timeouts.silent_s
        self.slow_s = min(SLOW_S_MAX, self.limit_s / 2)

    def deadline(self) -> float:
        """Looking more seldom would be taken for having been away."""
        return self._looked_at + self.slow_s / 2

    def watch(self, now: float) -> None:
        """Look for late heartbeats."""
        if now - self._looked_at > self.slow_s:
            # We were away ourselves (stopped, or starved); what they said is still to be read.
            for daemon in self.members.daemons.values():
                daemon.heard_at = now
        self._looked_at = now
        is_cut_off = self._is_cut_off(now)
        if self._was_cut_off and not is_cut_off:
            # The first is heard again; the others get the time that they need to come back.
            for daemon in self.members.daemons.values():
                daemon.heard_at = now
        self._was_cut_off = is_cut_off
        is_held_up = bool(self.context.unwritten) or self._is_without_room()
        for daemon in self.members.daemons.values():
            self._watch(daemon, now, is_cut_off)
            self._watch_start(daemon, now, is_held_up)
        if self.evaluations.overdue(now):
            name = self.evaluations.worker
            self._kill(self.members.daemons[name], "its evaluation does not end", now)
            self.evaluations.gone(name)

    def _is_cut_off(self, now: float) -> bool:
        """Whether nobody at all can be heard: then it is the network, or we ourselves, that fails.

        All of them at once do not freeze, and those who live on go on working with the servers.
        """
        known = [d for d in self.members.daemons.values() if d.alive and d.registered]
        return len(known) > 1 and all(now - d.heard_at > self.slow_s for d in known)

    def _watch_start(self, daemon: Daemon, now: float, is_held_up: bool) -> None:
        """A replacement that does not come to work: the first start has a deadline of its own.

        As long as nothing can be put on record, it gets no epoch or generation, or waits for
        somebody who gets none: that is not its fault. Nor is a disk without room for its state.
        """
        if daemon.registered and is_held_up:
            daemon.held_up_at = now
        ready_s, begun = self.run.job.timeouts.ready_s, daemon.started_at
        late = begun is not None and now - max(begun, daemon.held_up_at) > ready_s
        if late and daemon.state == "starting" and self.scheduler.released_at is not None:
            daemon.started_at = now
            self._kill(daemon, f"not at work after {ready_s:.0f} s ({daemon.phase})", now)

    def _is_without_room(self) -> bool:
        return any(server.phase == NO_ROOM for server in self.members.of_role("server"))

    def _kill(self, daemon: Daemon, why: str, now: float, **data: str) -> None:
        daemon.killed_for = f"killed: {why}"
        self.context.event("silent", daemon.name, f"{daemon.name}: {why}: it is killed", **data)
        self.context.kill(daemon, 9, now)

    def _watch(self, daemon: Daemon, now: float, is_cut_off: bool) -> None:
        """A daemon whose heartbeat is late is first `slow`, then killed: its exit does the rest."""
        silent_s = now - daemon.heard_at
        daemon.out_of_touch = daemon.role == "agent" and self.host_failures.is_away(daemon)
        if daemon.state == "running" and silent_s > self.slow_s:
            daemon.change_state(daemon_states.FALL_SILENT)
        if not daemon.alive or not daemon.registered or silent_s <= self.limit_s or is_cut_off:
            return
        if self.host_failures.is_away(daemon):
            self._do_without(daemon, now)
            return
        if self.members.agent_of(daemon).killed_for:
            return  # It is under way.
        daemon.heard_at = now  # Once per limit.
        self._kill(daemon, f"no heartbeat for {self.limit_s:.0f} s", now, code="heartbeat-late")

    def _do_without(self, daemon: Daemon, now: float) -> None:
        """Nobody is there to kill it, and it may live; but what can go on without it does."""
        daemon.out_of_touch = True
        if daemon.role == "worker":
            self.checkpointing.on_host_gone([daemon.name], now)
            self.evaluations.gone(daemon.name)

    def compare(self, agent: Daemon, children: object, now: float) -> None:
        """What an agent says that lives on its host, against what we believe.

        Exits are reported one by one, and repeated until they are noted. This is for what no agent
        has seen: daemons that died while there was none, and such as nobody wants any more. And for
        what no coordinator remembers: processes that one before this had started when its notes
        could not be written.
        """
        if not isinstance(children, dict):
            return
        for name, incarnation in children.items():
            if not isinstance(incarnation, int):
                continue
            known = self.members.get(name)
            is_ours = known is not None and known.agent == agent.name
            if known is not None and is_ours and self._is_unseen(known, incarnation):
                known.incarnation = incarnation
                self.on_exit(ProcessEnded(name, incarnation, STATUS_UNKNOWN, ()), now)
            elif known is not None and is_ours and known.incarnation == incarnation:
                continue
            self.context.send(agent.name, m.Kill(name, incarnation, 9))
        for daemon in self.members.hosted_by(agent):
            if not daemon.alive or daemon.pid is None:
                continue
            if daemon.agent_incarnation == agent.incarnation:
                continue
            daemon.agent_incarnation = agent.incarnation
            if children.get(daemon.name) != daemon.incarnation:
                unseen = ProcessEnded(daemon.name, daemon.incarnation, STATUS_UNKNOWN, ())
                self.on_exit(unseen, now)

    def _is_unseen(self, daemon: Daemon, incarnation: int) -> bool:
        """Whether its agent speaks of a newer process than the one on record.

        Nobody has been given its epoch or generation: that is on record together with its process,
        or it is not handed out. But its number is used.
        """
        newer = incarnation - daemon.incarnation
        if newer > UNSEEN_MAX:
            raise RemoteProtocolError("nobody has started so many")
        return newer > 0

    def on_exited(self, peer: Peer, message: m.ProcessExited, now: float) -> None:
        """An agent's word about one of its daemons; repeated until it is noted.

        What one says of a daemon that has become another one's changes nothing any more.
        """
        daemon = self.members.get(message.name)
        if daemon is not None and self.members.agent_of(daemon).peer not in (peer, None):
            if not self._is_an_agent(peer):  # Perhaps it is: that its next report will tell.
                raise RemoteProtocolError("it has no business with this daemon")
            self.context.send(peer, m.ExitNoted(message.name, message.incarnation))
            return
        if daemon is not None and self._is_unseen(daemon, message.incarnation):
            daemon.incarnation = message.incarnation
        self.context.send(peer, m.ExitNoted(message.name, message.incarnation))
        self.on_exit(
            ProcessEnded(
                message.name, message.incarnation, message.status, message.last_lines, message.cause
            ),
            now,
        )

    def _is_an_agent(self, peer: Peer) -> bool:
        return any(agent.peer == peer for agent in self.members.of_role("agent"))

    def on_exit(self, end: ProcessEnded, now: float) -> None:
        name = end.name
        daemon = self.members.get(name, end.incarnation)
        if daemon is None or not daemon.alive:
            return
        # One that we sent SIGTERM, because it had not registered yet, has done what it was told.
        asked = end.status in (0, STATUS_UNKNOWN)
        asked |= end.status == -15 and ("kill", name) in self.context.retries
        planned = self.run.shutdown is not None and asked
        said = last_error(end.status, end.last_lines)
        daemon.ended(end.status, end.last_lines, now, end.cause, said, is_planned=planned)
        self._drop_questions(name)
        assert daemon.last_exit is not None
        text = f"{name} ended: {in_full(daemon.last_exit)}"
        kind = "stop" if planned else "exit"
        last_lines = [] if planned else list(end.last_lines[-5:])
        if daemon.role != "agent" or not self.host_failures.is_away(daemon):
            self.context.event(kind, name, text, last_lines=last_lines, incarnation=end.incarnation)
        self.run.status_due_at = now
        self.checkpointing.on_gone(name, now)
        self.frozen.on_gone(name, now)
        self.evaluations.gone(name)
        if self.scaling.on_exit(daemon, now):
            return
        if daemon.role == "worker":
            self.lose_worker(daemon, end.status, end.last_lines, now)
        elif daemon.role == "server":
            self._lose_server(daemon, end, now)
        else:
            self._lose_agent(daemon, end, now)

    def _drop_questions(self, name: str) -> None:
        """What only this process could have answered."""
        servers = range(len(self.members.of_role("server")))
        asked = ("spawn", "assign", "guests", "shutdown", "kill", "drain")
        keys = [(what, name) for what in asked]
        for key in [*keys, *((f"moved{shard}", name) for shard in servers)]:
            self.context.retries.drop(key)
        self.settings.gone(name)

    def _lose_server(self, server: Daemon, end: ProcessEnded, now: float) -> None:
        if self.run.shutdown is not None and not self.run.shutdown.needs_servers():
            return
        if self._has_state(server) and server.deaths_in_row <= DEATHS_MAX:
            server.back_off(now)
            text = f"{server.name} goes on with its state: nothing acknowledged is lost"
            self.context.event("lost", server.name, text, code="daemon-restarting")
        else:
            self.control.end("failed", self._loss(server, end.last_lines), now)

    def _has_state(self, server: Daemon) -> bool:
        """Whether the next process of this shard can go on where this one was."""
        assert server.last_exit is not None
        # One that gave up by itself before it ever served would do the same again. We may have sent
        # it away because nobody remembered that it had been started.
        code = server.last_exit["code"]
        may_serve = server.has_served or code < 0 or code == EXIT_FENCED
        return self.run.keeps_shards() and may_serve and not server.error

    def _lose_agent(self, agent: Daemon, end: ProcessEnded, now: float) -> None:
        """The next one adopts the daemons that live; which do not, it will say."""
        if self.run.shutdown is not None and self.run.shutdown.is_leaving():
            return
        if self.host_failures.is_known(agent):
            self.host_failures.lose(agent, end.last_lines, now)
        elif end.status > 0 or agent.deaths_in_row > DEATHS_MAX:
            self.control.end("failed", self._loss(agent, end.last_lines), now)
        else:
            agent.back_off(now)
            text = f"{agent.name} starts again; its daemons go on"
            self.context.event("lost", agent.name, text, code="daemon-restarting")

    def _loss(self, daemon: Daemon, last_lines: tuple[str, ...]) -> str:
        """Why a run fails without this server or agent: in its own words, if it left any."""
        assert daemon.last_exit is not None
        said = last_error(daemon.last_exit["code"], last_lines)
        text = f"{daemon.name}: {said}"
        if not said:
            text = f"{daemon.name} ended: {daemon.last_exit['text']}"
        if daemon.role == "agent" and not daemon.has_worked:
            words = said or (last_lines[-1] if last_lines else daemon.last_exit["text"])
            return f"{daemon.name} cannot be started on {self.host_failures.host(daemon)}: {words}"
        if daemon.role == "agent":
            return f"{text}; its daemons are orphans"
        if self.scheduler.released_at is None:
            return text
        if not self.run.keeps_shards():
            return f"{text}; its shard is lost"
        died = plural(daemon.deaths_in_row, "time")
        return f"{text}; it has died {died} in a row, and what its shard has is kept"

    def lose_worker(
        self, worker: Daemon, status: int, last_lines: tuple[str, ...], now: float
    ) -> None:
        """The others go on: its portions are leased again, barriers do not count it any more."""
        portions = self.scheduler.gone(worker.index, now)
        self.control.notify_members()
        if self.run.shutdown is not None:
            return
        if status == EXIT_POISONED:
            self._quarantine(worker, last_error(status, last_lines), now)
        elif worker.error:
            self.control.end("failed", f"{worker.name}: {worker.error}", now)
        elif worker.deaths_in_row > self.run.job.workers.restarts_max:
            self._give_up(worker, last_error(status, last_lines), now)
        else:
            worker.back_off(now)
            again = f"; {plural(portions, 'portion')} of its data can be leased again"
            text = f"{worker.name} starts again{again if portions else ''}"
            self.context.event("lost", worker.name, text, code="daemon-restarting")

    def _give_up(self, worker: Daemon, said: str, now: float) -> None:
        """No restart mends it. One that has been at work in between did no harm to the others: they
        go on without it, as long as not all of them end like that.
        """
        last = worker.last_exit or {}
        died = plural(worker.deaths_in_row, "time")
        if last.get("had_lived") and (last.get("in_row") or 0) > 1:
            words = f"{ENDED_BY_ITSELF} ({last['text']}){last['blame']}"
            self._quarantine(worker, ": ".join(filter(None, (words, said))), now)
            return
        reason = f"{worker.name} died {died} before or soon after it was at work"
        blame = f": {in_full(last)}" if last.get("blame") else ""
        self.control.end("failed", f"{reason}{blame}", now)

    def _quarantine(self, worker: Daemon, error: str, now: float) -> None:
        worker.change_state(daemon_states.QUARANTINE)
        worker.error = error
        text = f"{worker.name} is quarantined: {worker.error}"
        self.context.event("quarantine", worker.name, text, code="daemon-quarantined")
        if reason := self.members.no_worker_left():
            self.control.end("failed", reason, now)

    def on_failed(self, peer: Peer, message: m.Failed, now: float) -> None:
        """A daemon's last words: the user's error, with the traceback in the user's code."""
        daemon = self.members.get(message.name)
        if daemon is None or daemon.peer != peer:
            return
        if message.fatal:
            daemon.error = message.error
        self.context.event("error", message.name, message.error, detail=message.detail)
        if message.fatal:
            self.control.end("failed", f"{message.name}: {message.error}", now)
