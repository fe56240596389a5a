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
from dlctl.text import plural

if TYPE_CHECKING:
    from dlctl.roles.coordinator import Coordinator

SLOW_S_MAX = 5.0
"""Without a word from a daemon after which `status` calls it slow; at the latest."""


_ERROR = "ERROR "
_BUG = 70


def last_error(status: int, last_lines: tuple[str, ...]) -> str:
    """What a daemon that gave up by itself said about it; "" if it was killed, or said nothing.

    `last_lines`: of its log, "LEVEL text" each, a traceback's lines as they are.
    """
    if status == _BUG and last_lines:
        return f"a bug in dlctl: {last_lines[-1]}"
    errors = [line.removeprefix(_ERROR) for line in last_lines if line.startswith(_ERROR)]
    return errors[-1] if errors and status > 0 else ""


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
        self.on_exit(
            message.name, message.incarnation, message.status, message.last_lines, now,
            message.cause,
        )  # fmt: skip

    def on_exit(
        self, name: str, incarnation: int, status: int, last_lines: tuple[str, ...], now: float,
        cause: str = "",
    ) -> None:  # fmt: skip
        daemon = self.members.get(name, incarnation)
        if daemon is None or not daemon.alive:
            return
        # One that we sent SIGTERM, because it had not registered yet, has done what it was told.
        asked = status == 0 or (status == -15 and ("kill", name) in self.desk.outstanding)
        planned = self.of.ending is not None and asked
        daemon.ended(status, last_lines, now, cause)
        if planned:
            daemon.state = "stopped"
        for key in ("spawn", "assign", "shutdown", "kill"):
            self.desk.outstanding.drop((key, name))
        assert daemon.last_exit is not None
        text = f"{name} ended: {daemon.last_exit['text']}"
        kind = "stop" if planned else "exit"
        self.desk.event(kind, name, text, last_lines=[] if planned else list(last_lines[-5:]))
        self.of.checkpointing.on_gone(name, now)
        self.of.evaluations.gone(name)
        if daemon.role == "worker":
            self._lose_worker(daemon, now)
        elif self.of.ending is None or self.of.ending.needs_servers():
            self.of.end("failed", self._loss(daemon, last_lines), now)

    def _loss(self, daemon: Daemon, last_lines: tuple[str, ...]) -> str:
        """Why a run fails without this server or agent: in its own words, if it left any."""
        assert daemon.last_exit is not None
        said = last_error(daemon.last_exit["code"], last_lines)
        text = f"{daemon.name}: {said}"
        if not said:
            text = f"{daemon.name} ended: {daemon.last_exit['text']}"
        if daemon.role == "agent":
            return f"{text}; its daemons are orphans"
        return text if self.of.work.released_at is None else f"{text}; its shard is lost"

    def _lose_worker(self, worker: Daemon, now: float) -> None:
        """The others go on: its portions are leased again, barriers do not count it any more."""
        portions = self.of.work.gone(worker.index, now)
        self.of.tell_members()
        if self.of.ending is not None:
            return
        if worker.error:
            self.of.end("failed", f"{worker.name}: {worker.error}", now)
        elif worker.restarts >= self.of.job.workers.restarts_max:
            self.of.end("failed", f"{worker.name} died {plural(worker.restarts + 1, 'time')}", now)
        else:
            worker.back_off(now)
            verb = "is" if portions == 1 else "are"
            text = f"{plural(portions, 'portion')} of {worker.name} {verb} leased again"
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
