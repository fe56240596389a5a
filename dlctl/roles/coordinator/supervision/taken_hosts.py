"""Hosts that come and go one by one: their owner, a batch system, queues, gives and takes each.

That is the normal state of such a run, and no failure. Until its host is there, a worker is
`queued`; the run trains with those that are there (`workers.min`). Before a host is taken back its
workers finish their step, push what they have, and leave. Then, or if there was no notice, its
agent is started again: its launcher asks for another host, and the workers start there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlctl.roles.coordinator.members import daemon_states
from dlctl.roles.coordinator.members.membership import Daemon
from dlctl.roles.coordinator.members.selections import ChangedDaemons
from dlctl.roles.coordinator.records import WantHosts
from dlctl.roles.coordinator.remote_files import LogMirror
from dlctl.roles.coordinator.run_state import CoordinatorPart
from dlctl.roles.coordinator.supervision.scaling import REMOVAL, TAKEN, Scaling
from dlctl.roles.protocol.effects import HostTaken
from dlctl.roles.protocol.files import Transfers

GONE = "gone with its host"
NOTICE_S = 300.0
"""For a host to be gone after its workers have left; then its agent is killed, and they return."""


@dataclass(eq=False)
class TakenHosts(CoordinatorPart):
    scaling: Scaling
    transfers: Transfers
    mirror: LogMirror
    _placed: ChangedDaemons[Daemon] = field(init=False)
    """Workers that were added, removed or moved."""
    _wanted: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self._placed = self.members.follow(("agent",), "worker")

    def note_wanted(self) -> None:
        """Say which agents have workers: a host for another one would be held for nothing."""
        if not self._placed.take() or not self._come_and_go():
            return
        wanted = {worker.agent for worker in self.members.of_role("worker") if not worker.key}
        if self._wanted != tuple(sorted(wanted)):
            self._wanted = tuple(sorted(wanted))
            self.context.do(WantHosts(self._wanted))

    def _come_and_go(self) -> bool:
        places = self.run.job.launcher.places
        return bool(places) and all(place.servers == 0 for place in places)

    def on_event(self, event: HostTaken, now: float) -> None:
        agent = self.members.get(event.name, event.incarnation)
        if agent is None or not agent.alive or self.run.shutdown is not None:
            return
        if event.is_gone:
            self._gone(agent, event.why, now)
            return
        self.context.event("notice", agent.name, f"{event.why}: its workers leave")
        agent.waits_for_host = True
        agent.kill_at = now + self.run.job.timeouts.grace_s + NOTICE_S
        for daemon in self.members.hosted_by(agent):
            if daemon.alive and daemon.role == "worker" and not daemon.leaving:
                self.scaling.leave(daemon, TAKEN, now)

    def await_answer(self, agent: Daemon) -> bool:
        """Whether the end or the silence of an agent is no failure yet: its host is taken back, or
        comes and goes, and its launcher is about to be asked for one. No server is lost with it.
        """
        if any(daemon.role == "server" for daemon in self.members.hosted_by(agent)):
            return False
        agent.waits_for_host |= self._come_and_go() and agent.deaths_in_row <= 1
        return agent.waits_for_host

    def _gone(self, agent: Daemon, why: str, now: float) -> None:
        if agent.registered:
            self.context.event("taken", agent.name, why)
        hosted = self.members.hosted_by(agent)
        for daemon in hosted:
            self._await_host(daemon, why, now)
        servers = [daemon for daemon in hosted if daemon.role == "server" and daemon.alive]
        for daemon in [*servers, agent]:  # A server is restored there, or the run ends, as ever.
            daemon.killed_for = GONE
            daemon.leaving = daemon.leaving or (TAKEN if daemon is agent else "")
            self.control.presume_dead(daemon, now)
        agent.waits_for_host = True
        self.transfers.fail_all(agent.name, why, now)
        self.mirror.lose(agent.name)

    def wait(self, agent: Daemon, why: str, now: float) -> None:
        """The agent has no host now, because of `why`: nothing runs there."""
        if self.run.shutdown is not None:
            return
        agent.waits_for_host = True
        hosted = self.members.hosted_by(agent)
        if not any(daemon.role == "server" for daemon in hosted):
            agent.given_up_at = None  # That is the owner's business, and no failure.
        for daemon in hosted:
            self._await_host(daemon, why, now)

    def _await_host(self, worker: Daemon, why: str, now: float) -> None:
        if worker.role != "worker":
            return
        if worker.alive:
            worker.killed_for = GONE
            if worker.leaving != REMOVAL:  # `dlctl scale` has said so, and was told that it goes.
                worker.leaving = TAKEN
            self.control.presume_dead(worker, now)
        elif worker.state in daemon_states.UNSTARTED:
            worker.retry_at = None
            worker.change_state(daemon_states.QUEUED)
        if worker.state == daemon_states.QUEUED:
            worker.phase = why
