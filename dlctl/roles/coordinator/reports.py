"""What daemons say about themselves once a second, and about what they have evaluated."""

from __future__ import annotations

from dlctl import messages as m
from dlctl.machine import Peer
from dlctl.roles.coordinator import daemon_states
from dlctl.roles.coordinator.control import Control
from dlctl.roles.coordinator.evaluation import Evaluations
from dlctl.roles.coordinator.failure_detector import FailureDetector
from dlctl.roles.coordinator.membership import Daemon
from dlctl.roles.coordinator.records import AddMetric
from dlctl.roles.coordinator.run_state import RunState
from dlctl.roles.coordinator.scheduler import Scheduler


class Reports:
    def __init__(
        self,
        run: RunState,
        control: Control,
        scheduler: Scheduler,
        evaluations: Evaluations,
        failure_detector: FailureDetector,
    ) -> None:
        self.run = run
        self.control = control
        self.context = run.context
        self.scheduler = scheduler
        self.evaluations = evaluations
        self.failure_detector = failure_detector

    def heard(self, daemon: Daemon, peer: Peer, now: float) -> None:
        """A sign of life. If it comes over another connection, what was sent over the last one may
        be lost.
        """
        if peer != daemon.peer:
            self.context.again(daemon.name, now, now)
        daemon.heard(peer, now)

    def on_report(self, peer: Peer, report: m.Report, now: float) -> None:
        """A sign of life, and news for `status`; the answer tells that the coordinator is there."""
        daemon = self.run.members.get(report.name, report.incarnation)
        if daemon is None or not daemon.alive:
            self.context.send(peer, m.Dismiss(f"{report.name} has been replaced"))
            return
        self.heard(daemon, peer, now)
        if daemon.state in daemon_states.AT_WORK:
            is_stuck = "stuck_s" in report.metrics
            daemon.change_state(daemon_states.FALL_SILENT if is_stuck else daemon_states.RECOVER)
        daemon.report(report.phase, report.waiting_for, now)
        daemon.metrics = report.metrics
        self.evaluations.on_report(daemon, now)
        self.context.send(daemon.name, m.Heard())
        if daemon.role == "agent":
            if not daemon.registered:
                # Another coordinator has welcomed it, and could not write that down.
                self.context.send(daemon.name, m.RegisterAgain())
            self.failure_detector.compare(daemon, report.metrics.get("children"), now)
            return
        if daemon.role == "server":
            if self.run.shutdown is None and (last := report.metrics.get("last_checkpoint")):
                # It has failed, or whoever asked for it could not write down that the run ends.
                self.context.send(daemon.name, m.Reopen(last))
            self.control.notify_members(daemon)
        elif "step" in report.metrics:
            # It trains, although nobody remembers that it has asked for data.
            self.is_at_work(daemon, now)
        if self.run.is_working:
            step = report.metrics.get("step") or report.metrics.get("version")
            step = step if isinstance(step, int) and step < 2**63 else 0
            self.context.do(AddMetric(report.name, step, report.metrics))

    def is_at_work(self, worker: Daemon, now: float) -> None:
        """A worker has asked for data: it takes part, or drains at once if the run ends."""
        if not worker.asked_for_data:
            worker.asked_for_data = True
            if self.run.shutdown is None:
                worker.change_state(daemon_states.WORK)
            self.control.notify_members()
        if self.run.shutdown is not None:
            self.run.shutdown.drain_late(worker, now)

    def on_evaluated(self, message: m.Evaluated, now: float) -> None:
        """Metrics of an evaluation; they may end the run."""
        step, metrics = self.evaluations.on_evaluated(message, now) or (0, {})
        if not metrics:
            return
        shown = ", ".join(f"{key} {value:.4g}" for key, value in metrics.items())
        self.context.event("evaluation", message.name, f"step {step}: {shown}")
        target = self.scheduler.target
        if target is not None and target.is_reached(metrics):
            self.control.end("finished", f"the target {target} is reached", now)
