"""Daemons that are silent, die, or say that they cannot go on; and what follows for the run.

A worker is replaced, with growing pauses and not for ever; the others do not wait for it. A server
takes its shard with it, an agent its daemons: the run ends, and can go on from its checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlctl import messages as m
from dlctl.machine import Peer
from dlctl.roles.journal import KillAgent
from dlctl.roles.membership import Daemon

if TYPE_CHECKING:
    from dlctl.roles.coordinator import Coordinator

SLOW_S_MAX = 5.0
"""Without a word from a daemon after which `status` calls it slow; at the latest."""


class Losses:
    def __init__(self, coordinator: Coordinator) -> None:
        self.of = coordinator
        self.desk = coordinator.desk
        self.members = coordinator.members
        self.limit_s = coordinator.job.timeouts.silent_s
        self.slow_s = min(SLOW_S_MAX, self.limit_s / 2)
        self._looked_at = 0.0

    def watch(self, now: float) -> None:
        """Look for daemons that are silent; often, about twice a second."""
        if now - self._looked_at > self.slow_s:
            # We were away ourselves (stopped, or starved); what they said is still to be read.
            for daemon in self.members.daemons.values():
                daemon.heard_at = now
        self._looked_at = now
        for daemon in self.members.daemons.values():
            self._watch(daemon, now)
            self._watch_start(daemon, now)
        if self.of.evaluations.overdue(now):
            name = self.of.evaluations.worker
            self._kill(self.members.daemons[name], "its evaluation does not end", now)
            self.of.evaluations.gone(name)

    def _watch_start(self, daemon: Daemon, now: float) -> None:
        """A replacement that does not come to work: the first start has a deadline of its own."""
        ready_s = self.of.job.timeouts.ready_s
        late = daemon.started_at is not None and now - daemon.started_at > ready_s
        if late and daemon.state == "starting" and self.of.work.released_at is not None:
            daemon.started_at = now
            self._kill(daemon, f"not at work after {ready_s:.0f} s ({daemon.phase})", now)

    def _kill(self, daemon: Daemon, why: str, now: float) -> None:
        self.desk.event("silent", daemon.name, f"{daemon.name}: {why}: it is killed")
        if daemon.role == "agent":
            self.desk.do(KillAgent(daemon.name))
        else:
            self.desk.send("agent-0", m.Kill(daemon.name, daemon.incarnation, 9))

    def _watch(self, daemon: Daemon, now: float) -> None:
        """A daemon that does not say a word is first slow, then killed: its exit does the rest."""
        silent_s = now - daemon.heard_at
        if daemon.state == "running" and silent_s > self.slow_s:
            daemon.state = "slow"
        if not daemon.alive or not daemon.registered or silent_s <= self.limit_s:
            return
        daemon.heard_at = now  # Once per limit.
        self._kill(daemon, f"no word for {self.limit_s:.0f} s", now)

    def on_exited(self, peer: Peer, message: m.ProcessExited, now: float) -> None:
        """An agent's word about one of its daemons; repeated until it is noted."""
        self.desk.send(peer, m.ExitNoted(message.name, message.incarnation))
        self.on_exit(message.name, message.incarnation, message.status, message.last_lines, now)

    def on_exit(
        self, name: str, incarnation: int, status: int, last_lines: tuple[str, ...], now: float
    ) -> None:
        daemon = self.members.get(name, incarnation)
        if daemon is None or not daemon.alive:
            return
        daemon.ended(status, last_lines, now)
        for key in ("spawn", "assign", "shutdown", "kill"):
            self.desk.outstanding.drop((key, name))
        assert daemon.last_exit is not None
        text = f"{name} ended: {daemon.last_exit['text']}"
        planned = self.of.ending is not None and status == 0
        kind = "stop" if planned else "exit"
        self.desk.event(kind, name, text, last_lines=[] if planned else list(last_lines[-5:]))
        self.of.checkpointing.on_gone(name, now)
        self.of.evaluations.gone(name)
        if daemon.role == "worker":
            self._lose_worker(daemon, now)
        elif self.of.ending is None or self.of.ending.needs_servers():
            what = "its shard is lost" if daemon.role == "server" else "its daemons are orphans"
            self.of.end("failed", f"{text}; {what}", now)

    def _lose_worker(self, worker: Daemon, now: float) -> None:
        """The others go on: its portions are leased again, barriers do not count it any more."""
        portions = self.of.work.gone(worker.index, now)
        self.of.tell_members()
        if self.of.ending is not None:
            return
        if worker.error:
            self.of.end("failed", f"{worker.name}: {worker.error}", now)
        elif worker.restarts >= self.of.job.workers.restarts_max:
            self.of.end("failed", f"{worker.name} died {worker.restarts + 1} times", now)
        else:
            worker.back_off(now)
            text = f"{portions} portions of {worker.name} are leased again"
            self.desk.event("lost", worker.name, text)

    def on_failed(self, peer: Peer, message: m.Failed, now: float) -> None:
        """A daemon's last words: the user's error, with the traceback in the user's code."""
        daemon = self.members.get(message.name)
        if daemon is None or daemon.peer != peer:
            return
        daemon.error = message.error
        self.desk.event("error", message.name, message.error, detail=message.detail)
        if message.fatal:
            self.of.end("failed", f"{message.name}: {message.error}", now)
