"""What daemons say about themselves once a second, and about what they have evaluated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlctl import messages as m
from dlctl.machine import Peer
from dlctl.roles.coordinator.membership import Daemon
from dlctl.roles.coordinator.records import AddMetric

if TYPE_CHECKING:
    from dlctl.roles.coordinator.coordinator import Coordinator


class Reports:
    def __init__(self, coordinator: Coordinator) -> None:
        self.of = coordinator
        self.context = coordinator.context

    def heard(self, daemon: Daemon, peer: Peer, now: float) -> None:
        """A sign of life. If it comes over another connection, what was sent over the last one may
        be lost.
        """
        if peer != daemon.peer:
            self.context.again(daemon.name, now, now)
        daemon.heard(peer, now)

    def on_report(self, peer: Peer, report: m.Report, now: float) -> None:
        """A sign of life, and news for `status`; the answer tells that the coordinator is there."""
        of = self.of
        daemon = of.members.get(report.name, report.incarnation)
        if daemon is None or not daemon.alive:
            self.context.send(peer, m.Dismiss(f"{report.name} has been replaced"))
            return
        self.heard(daemon, peer, now)
        if daemon.state in ("running", "slow"):
            daemon.state = "slow" if "stuck_s" in report.metrics else "running"
        daemon.report(report.phase, report.waiting_for, now)
        daemon.metrics = report.metrics
        of.evaluations.on_report(daemon, now)
        self.context.send(daemon.name, m.Heard())
        if daemon.role == "agent":
            if not daemon.registered:
                # Another coordinator has welcomed it, and could not write that down.
                self.context.send(daemon.name, m.RegisterAgain())
            of.losses.compare(daemon, report.metrics.get("children"), now)
            return
        if daemon.role == "server":
            if of.ending is None and (last := report.metrics.get("last_checkpoint")):
                # It has failed, or whoever asked for it could not write down that the run ends.
                self.context.send(daemon.name, m.Reopen(last))
            of.tell_members(daemon)
        elif "step" in report.metrics:
            # It trains, although nobody remembers that it has asked for data.
            self.is_at_work(daemon, now)
        if of.state in ("running", "degraded"):
            step = report.metrics.get("step") or report.metrics.get("version")
            step = step if isinstance(step, int) and step < 2**63 else 0
            self.context.do(AddMetric(report.name, step, report.metrics))

    def is_at_work(self, worker: Daemon, now: float) -> None:
        """A worker has asked for data: it takes part, or drains at once if the run ends."""
        if not worker.asked_for_data:
            worker.asked_for_data = True
            worker.state = "running" if self.of.ending is None else worker.state
            self.of.tell_members()
        if self.of.ending is not None:
            self.of.ending.drain_late(worker, now)

    def on_evaluated(self, message: m.Evaluated, now: float) -> None:
        """Metrics of an evaluation; they may end the run."""
        of = self.of
        step, metrics = of.evaluations.on_evaluated(message, now) or (0, {})
        if not metrics:
            return
        shown = ", ".join(f"{key} {value:.4g}" for key, value in metrics.items())
        self.context.event("evaluation", message.name, f"step {step}: {shown}")
        target = of.work.target
        if target is not None and target.is_reached(metrics):
            of.end("finished", f"the target {target} is reached", now)
