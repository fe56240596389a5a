"""Hosts that cannot be reached any more: tried again for a while, and then given up.

An agent on another machine is known by its messages only. When it is silent it is started again
over ssh; as long as that fails, its host is away. What runs there goes on by itself, and nobody
else may take its place: it may come back with everything that it has. After `host_s` the host is
given up. Its workers are started on the others, with new epochs, so that the old ones are fenced
should they live. A server's shard is on that host only, so that without it the run ends, and can go
on from its checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlctl.names import HOME_AGENT
from dlctl.roles.membership import STATUS_UNKNOWN, Daemon

if TYPE_CHECKING:
    from dlctl.roles.coordinator import Coordinator


class Hosts:
    def __init__(self, coordinator: Coordinator) -> None:
        self.of = coordinator
        self.desk = coordinator.desk
        self.members = coordinator.members
        self.limit_s = coordinator.job.timeouts.host_s
        self._away_since: dict[str, float] = {}

    def is_known(self, agent: Daemon) -> bool:
        """Whether this host has been there: then it may come back."""
        return agent.name != HOME_AGENT and agent.has_worked

    def is_away(self, daemon: Daemon) -> bool:
        """Whether nobody on its host answers: no order gets there now."""
        return daemon.agent in self._away_since

    def is_back(self, agent: Daemon) -> None:
        """Its agent has registered."""
        agent.has_worked = True
        self._away_since.pop(agent.name, None)

    def lose(self, agent: Daemon, words: tuple[str, ...], now: float) -> None:
        """An attempt to reach it has failed, or its agent has fallen silent."""
        since = self._away_since.setdefault(agent.name, now)
        if now - since < self.limit_s:
            agent.back_off(now)
            if agent.deaths_in_row <= 1:
                said = f": {words[-1]}" if words else ""
                text = f"{agent.name} on {self.host(agent)} is started again{said}"
                self.desk.event("lost", agent.name, text)
        else:
            self._give_up(agent, now)

    def host(self, agent: Daemon) -> str:
        """Its name in the job file."""
        return self.of.agents[agent.name].ssh or "this machine"

    def _give_up(self, agent: Daemon, now: float) -> None:
        agent.state, agent.retry_at = "failed", None
        hosted = self.members.hosted_by(agent)
        for daemon in hosted:
            if daemon.alive:
                daemon.killed_for = "given up with its host"
                daemon.ended(STATUS_UNKNOWN, (), now)
        servers = [daemon.name for daemon in hosted if daemon.role == "server"]
        text = f"the host {self.host(agent)} has not been reached for {self.limit_s:.0f} s"
        self.desk.event("lost", agent.name, f"{text}: it is given up")
        self.of.checkpointing.on_host_gone([daemon.name for daemon in hosted], now)
        self.of.files.lose(agent.name, text, now)
        for daemon in hosted:
            self.of.evaluations.gone(daemon.name)
        if servers:
            shards = "its shard is" if len(servers) == 1 else "their shards are"
            reason = f"{text}, and with it {' and '.join(servers)}: {shards} lost"
            self.of.end("failed", reason, now)
            return
        for worker in hosted:
            worker.agent = self.members.least_busy()
            self.of.losses.lose_worker(worker, STATUS_UNKNOWN, (), now)
