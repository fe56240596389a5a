"""Adds and removes workers of an active run, and restarts daemons on request.

A worker leaves in order: it finishes its portion, pushes what it has accumulated, waits for the
acks and exits. On a restart a new incarnation follows. A server or an agent is simply killed: its
successor resumes from its state, as after any other death.

A coordinator that is to be restarted exits once the agent on its machine is running: that agent
starts the next coordinator, and only a coordinator starts the next agent. The next coordinator
continues the request (`resume`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlctl.errors import DlctlError
from dlctl.roles.coordinator.members import daemon_states
from dlctl.roles.coordinator.members.membership import LEFT, Daemon
from dlctl.roles.coordinator.run_state import CoordinatorPart
from dlctl.roles.coordinator.training.leases import Leases
from dlctl.roles.coordinator.training.scaled_rate import ScaledRate
from dlctl.util.names import HOME_AGENT
from dlctl.wire import messages as m
from dlctl.wire.messages import Json

RESTART, REMOVAL = "restart", "removal"
TAKEN = "taken"
"""Why a worker leaves whose host is taken back: it returns on the next one."""


@dataclass(eq=False)
class Scaling(CoordinatorPart):
    leases: Leases
    rate: ScaledRate
    _hands_over: str = field(default="", init=False)
    """Why this coordinator exits as soon as it can; "" while it stays."""

    # ------------------------------------------------------------ requests

    def scale(self, count: int, now: float) -> Json:
        """Scale to `count` workers. Returns which start and which leave. Raises DlctlError."""
        self.check_running()
        if self.run.division.is_divided:
            raise DlctlError(
                "the workers of a run with parties are those of its parties",
                hint="change workers in [[parties]] of the job file, then `dlctl start` again",
            )
        most = self.run.algorithm.shape.workers_max
        if not 1 <= count <= most:
            raise DlctlError(f"a run has 1 to {most} workers, not {count}")
        own = [d for d in self.members.of_role("worker") if not d.key]
        staying = [d for d in own if d.leaving != REMOVAL]
        before = len(staying)
        started, left = [], []
        for _ in range(count - before):
            leaving = (d for d in own if d.leaving == REMOVAL)
            worker = next(leaving, None) or self.members.add_worker()
            started.append(worker.name)
            agent = self.members.agent_of(worker)
            if worker.leaving:
                worker.leaving = RESTART
            elif agent.waits_for_host and not agent.registered:
                worker.change_state(daemon_states.QUEUED)  # It starts when its agent is there.
                worker.phase = agent.phase
            else:
                self.control.start_daemon(worker, now)
        if started:
            self.control.admit_members(now)
        # Quarantined workers leave first, then those of the highest index.
        in_order = sorted(
            staying, key=lambda worker: (worker.state != "quarantined", -worker.index)
        )
        for worker in in_order[: max(0, before - count)]:
            left.append(worker.name)
            self.leave(worker, REMOVAL, now)
        if count != before:
            text = f"workers {before} -> {count}"
            self.context.event("scale", "", text, before=before, after=count)
            self.rate.rescale(count)
            self.control.notify_members()
        return {"before": before, "after": count, "starting": started, "leaving": left}

    def restart(self, names: list[str], now: float) -> None:
        """Replace these daemons by new incarnations. Raises DlctlError before any change."""
        self.check_running()
        daemons = []
        for name in names:
            daemon = self.members.daemons.get(name)
            if daemon is None or daemon.role == "guest":
                raise DlctlError(f"this run has no {name:.80}")
            if daemon.role == "server" and not self.run.keeps_shards():
                raise DlctlError(
                    f"{name} cannot be restarted: its shard would be lost with it",
                    hint='only with durability = "process" or "disk" in [servers]',
                )
            daemons.append(daemon)
        for daemon in daemons:
            self.context.event("restart", daemon.name, f"{daemon.name} is restarted on request")
            self.leave(daemon, RESTART, now)

    # ------------------------------------------------------------ leaving

    def leave(self, daemon: Daemon, why: str, now: float) -> None:
        """Make a daemon leave, in order if it can."""
        daemon.leaving = why
        if not daemon.alive:
            self._gone(daemon, now)
        elif daemon.drained:
            self.on_drained(daemon, now)  # It has reported that, and does not do so again.
        elif daemon.role == "worker" and daemon.asked_for_data:
            daemon.kill_at = now + self.run.job.timeouts.grace_s
            self.context.drain(daemon, why, now)
        else:
            is_taken = why == TAKEN
            words = ": its host is taken back" if is_taken else f" for a {why} on request"
            daemon.killed_for = f"killed{words}"
            self.context.kill(daemon, 9, now)

    def on_drained(self, worker: Daemon, now: float) -> None:
        """All its pushes are in the shards: it may exit. If we did not ask it to drain, its script
        has left the training loop, or an earlier coordinator asked and could not record that: the
        worker takes no more data, and another process follows.
        """
        if self.run.shutdown is None:
            worker.leaving = worker.leaving or LEFT
            worker.kill_at = now + self.run.job.timeouts.grace_s
            shutdown = m.Shutdown(REMOVAL if worker.leaving == REMOVAL else RESTART)
            self.context.ask(("shutdown", worker.name), worker.name, shutdown, now)

    def on_exit(self, daemon: Daemon, now: float) -> bool:
        """Whether this exit was requested, so that it is no failure."""
        if not daemon.leaving or self.run.shutdown is not None:
            return False
        if daemon.leaving == LEFT:
            daemon.leaving = ""
            return False
        self._gone(daemon, now)
        return True

    def _gone(self, daemon: Daemon, now: float) -> None:
        why, daemon.leaving = daemon.leaving, ""
        if daemon.role == "worker":
            self.leases.gone(daemon.index, now)
        if why == REMOVAL:
            self.members.remove(daemon.name)
            self.control.admit_members(now)
            if reason := self.members.no_worker_left():
                self.control.end("failed", reason, now)
        elif why == TAKEN and daemon.role == "worker":
            daemon.forgive()
            daemon.change_state(daemon_states.QUEUED)
        else:
            daemon.restarts += 1
            daemon.forgive()
            self.control.start_daemon(daemon, now)
        if daemon.role == "worker":
            self.control.notify_members()

    def resume(self, now: float) -> None:
        """Continue with the daemons that were leaving under an earlier coordinator.

        Also restart workers that were drained for an earlier end of the run and survived it, on a
        host that was unreachable then: they take no more data.
        """
        for daemon in list(self.members.daemons.values()):
            if daemon.alive and (daemon.drained or daemon.state == "draining"):
                daemon.leaving = daemon.leaving or RESTART
            if daemon.leaving:
                self.leave(daemon, REMOVAL if daemon.leaving == REMOVAL else RESTART, now)

    # ------------------------------------------------------------ the coordinator itself

    def hand_over(self, why: str) -> None:
        """Exit for the next coordinator once an agent is running that starts it."""
        self._hands_over = why

    def advance(self, now: float) -> None:
        agent = self.members.daemons[HOME_AGENT]
        is_going = agent.leaving or agent.killed_for
        if self.run.shutdown is not None:
            self._hands_over = ""  # This coordinator exits with the run.
        elif self._hands_over and agent.state == "running" and agent.registered and not is_going:
            self.context.leave(self._hands_over)
            self._hands_over = ""
            # Commands must find the new agent on record: else nothing would seem to be alive.
            self.run.status_due_at = now
