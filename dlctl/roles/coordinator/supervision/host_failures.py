"""Unreachable hosts: retried for a while, then given up.

An agent on another machine has no heartbeat but its messages. When it is silent it is
restarted there; while that fails, its host is away. Processes there keep running on their own,
and are not replaced: they may come back with all of their state. After `host_s` the host is given
up. Its workers are started on other hosts, with new terms, so that the old ones are fenced if they
are still alive. A server's shard is on that host only: without it the run ends, and can resume from
its checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlctl.job import placement
from dlctl.roles.coordinator.checkpointing import Checkpointing
from dlctl.roles.coordinator.evaluation import Evaluations
from dlctl.roles.coordinator.members import daemon_states
from dlctl.roles.coordinator.members.membership import Daemon
from dlctl.roles.coordinator.remote_files import LogMirror
from dlctl.roles.coordinator.run_state import CoordinatorPart
from dlctl.roles.coordinator.supervision.taken_hosts import TakenHosts
from dlctl.roles.coordinator.training.leases import Leases
from dlctl.roles.protocol.effects import AgentWaits, HostsTaken
from dlctl.roles.protocol.files import Transfers
from dlctl.roles.protocol.limits import STATUS_UNKNOWN
from dlctl.util.hostnames import HERE
from dlctl.util.names import HOME_AGENT
from dlctl.util.text import grave
from dlctl.wire.messages import ProcessExited


@dataclass(eq=False)
class HostFailures(CoordinatorPart):
    leases: Leases
    evaluations: Evaluations
    checkpointing: Checkpointing
    transfers: Transfers
    mirror: LogMirror
    taken_hosts: TakenHosts
    _waits_for: dict[str, str] = field(default_factory=dict, init=False)
    """Agent -> why it waits."""

    def __post_init__(self) -> None:
        self.limit_s = self.run.job.timeouts.host_s
        self._agents = placement.agents(self.run.job.places)

    def is_away(self, daemon: Daemon) -> bool:
        """Whether its host is unreachable, so that no request arrives there now."""
        return self.members.agent_of(daemon).given_up_at is not None

    def lose(self, agent: Daemon, words: tuple[str, ...], now: float) -> None:
        """An attempt to reach the host has failed, or its agent is silent."""
        if self.taken_hosts.await_answer(agent):
            agent.back_off(now)
            return
        if agent.given_up_at is None:
            agent.given_up_at = now + self.limit_s
        if now < agent.given_up_at:
            agent.back_off(now)
            if agent.deaths_in_row <= 1:
                last_line = "".join(f": {line}" for line in grave(words)[-1:])
                text = f"{agent.name} on {self.host(agent)} is started again{last_line}"
                self.context.event("lost", agent.name, text, code="host-unreachable")
        else:
            self._give_up(agent, now)

    def host(self, agent: Daemon) -> str:
        """The host's name in the job file, or its own name if the launcher has chosen it."""
        host = self._agents[agent.name]
        return host.name or agent.host or "its host" if host.is_other else HERE

    def on_event(self, event: AgentWaits | HostsTaken, now: float) -> None:
        match event:
            case AgentWaits(name, incarnation, why):
                agent = self.members.get(name, incarnation)
                if agent is not None and agent.state == "starting":
                    self._wait(agent, why, now)
            case HostsTaken("ending", reason):
                self.control.end("stopped", reason, now)
            case HostsTaken("saving", reason):
                self.context.event("notice", "", f"{reason}: a checkpoint is saved")
                if self.run.is_working:
                    self.control.begin_checkpoint(now)
            case HostsTaken("over", reason):
                self._lose_all(reason, now)

    def _wait(self, agent: Daemon, why: str, now: float) -> None:
        """An agent waits for its allocation: its deadlines start once it can be started."""
        agent.phase = why
        self.taken_hosts.wait(agent, why, now)
        agent.started_at = agent.heard_at = now
        if agent.given_up_at is not None:
            agent.given_up_at = now + self.limit_s
        if self.run.state == "starting" and self.members.hosted_by(agent):
            self.run.started_at = now
        is_new = why not in self._waits_for.values()
        self._waits_for[agent.name] = why
        if is_new:
            self.context.event("waits", agent.name, why)

    def _lose_all(self, reason: str, now: float) -> None:
        """All other hosts are gone: no process there can finish, or be asked to exit."""
        for agent in self.members.of_role("agent"):
            if agent.name != HOME_AGENT:
                self._gone([agent, *self.members.hosted_by(agent)], "gone with its host", now)
                self._lose_host(agent, reason, now)
        self.control.end("failed", reason, now, at_once=True)

    def _lose_host(self, agent: Daemon, why: str, now: float) -> None:
        """Give up a host: its agent is not tried again, and the files there are lost."""
        agent.change_state(daemon_states.FAILED)
        agent.retry_at = None
        for daemon in self.members.hosted_by(agent):
            self.checkpointing.on_gone(daemon.name, now, lost=why)
        self.transfers.fail_all(agent.name, why, now)
        self.mirror.lose(agent.name)

    def _gone(self, daemons: list[Daemon], why: str, now: float) -> None:
        """The daemons are lost and not replaced: the run is about to end."""
        for daemon in daemons:
            if daemon.alive:
                daemon.killed_for = why
                daemon.ended(
                    ProcessExited(daemon.name, daemon.incarnation, STATUS_UNKNOWN, ()), now
                )
            if daemon.state != "quarantined":
                daemon.change_state(daemon_states.FAILED)
            daemon.retry_at = None
            if daemon.role == "worker":
                self.leases.gone(daemon.index, now)
            self.evaluations.gone(daemon.name)

    def _give_up(self, agent: Daemon, now: float) -> None:
        hosted = self.members.hosted_by(agent)
        servers = [daemon.name for daemon in hosted if daemon.role == "server"]
        text = f"the host {self.host(agent)} has not been reached for {self.limit_s:.0f} s"
        self.context.event("lost", agent.name, f"{text}: it is given up")
        self._lose_host(agent, text, now)
        if servers:
            self._gone(hosted, "given up with its host", now)
            shards = "its shard is" if len(servers) == 1 else "their shards are"
            reason = f"{text}, and with it {' and '.join(servers)}: {shards} lost"
            self.control.end("failed", reason, now)
            return
        if self.run.division.is_divided:
            self._gone(hosted, "given up with its host", now)
            names = " and ".join(daemon.name for daemon in hosted)
            reason = f"{text}, and with it {names}: a party works on its own host only"
            self.control.end("failed", reason, now)
            return
        for worker in hosted:
            worker.agent = self.members.least_busy()
            if worker.state == daemon_states.QUEUED:
                self.control.start_daemon(worker, now)
                continue
            worker.killed_for = "given up with its host"
            self.control.presume_dead(worker, now)
