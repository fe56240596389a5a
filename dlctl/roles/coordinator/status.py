"""What `status` shows: the coordinator's state as rows, twice a second and at changes; and the
daemons' reports, once a second, and results of evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from dlctl.algorithms.noise import noise_scale
from dlctl.job import rounds
from dlctl.job.config import JobFile
from dlctl.problems import NAMED_MAX
from dlctl.records import evaluated
from dlctl.records.series import EVALUATION, RUN
from dlctl.roles.coordinator import problems
from dlctl.roles.coordinator.checkpoint_mirror import CheckpointMirror
from dlctl.roles.coordinator.checkpointing import Checkpointing
from dlctl.roles.coordinator.evaluation import Evaluations
from dlctl.roles.coordinator.link_bytes import LinkBytes
from dlctl.roles.coordinator.members import daemon_states
from dlctl.roles.coordinator.members.membership import Daemon
from dlctl.roles.coordinator.records import AddMetric, StatusSnapshot
from dlctl.roles.coordinator.run_state import CoordinatorPart, RunState
from dlctl.roles.coordinator.settings import SettingChanges
from dlctl.roles.coordinator.supervision.failure_detector import FailureDetector
from dlctl.roles.coordinator.supervision.recutting import Recutting
from dlctl.roles.coordinator.supervision.registration import Registration
from dlctl.roles.coordinator.training.lead import MethodLead
from dlctl.roles.coordinator.training.leases import Leases
from dlctl.roles.coordinator.training.run_progress import RunProgress
from dlctl.roles.coordinator.training.supply import DataSupply
from dlctl.roles.protocol.authz import GUEST
from dlctl.roles.protocol.meters import Pace
from dlctl.util import values
from dlctl.util.names import LINKS
from dlctl.wire import messages as m
from dlctl.wire.machine import Peer
from dlctl.wire.messages import Json

COUNTERS = ("push_bytes", "fetch_bytes", "pushes", "staleness_sum")
COUNT_MAX = 2**63


class Totals:
    """Cumulative counters of a run over all of its executions.

    A worker's counters are those of its process. They are summed here over all processes. The
    totals include exactly the counters in the daemons' rows of the same snapshot, so the next
    coordinator continues from there and counts nothing twice.
    """

    def __init__(self, before: Json, daemons: Mapping[str, Json]) -> None:
        """before: totals of the newest snapshot. daemons: the rows in that snapshot."""
        self._counts = {name: _count(before, name) for name in COUNTERS}
        seconds = before.get("seconds")
        self._seconds = float(seconds) if isinstance(seconds, int | float) else 0.0
        self._counted = {
            name: (row["incarnation"], row.get("metrics") or {}) for name, row in daemons.items()
        }
        self._seen_at: float | None = None

    def count(self, worker: str, incarnation: int, metrics: Json) -> None:
        """Count the figures that a process of a worker has reported."""
        of, before = self._counted.get(worker, (0, {}))
        for name in COUNTERS:
            now, was = _count(metrics, name), _count(before, name) if of == incarnation else 0
            # The counter was reset, as when a worker has joined again.
            self._counts[name] += now - was if now >= was else now
        self._counted[worker] = (incarnation, metrics)

    def look(self, now: float, *, is_working: bool) -> Json:
        """{seconds: of training, push_bytes, fetch_bytes, pushes, staleness_sum: over pushes}."""
        if self._seen_at is not None:
            self._seconds += now - self._seen_at
        self._seen_at = now if is_working else None
        return {"seconds": round(self._seconds, 3), **self._counts}


def _count(metrics: Json, name: str) -> int:
    """The value of a counter in a report; 0 if it is not valid."""
    value = metrics.get(name)
    return value if type(value) is int and 0 <= value < COUNT_MAX else 0


NOISE_MIN = 0.5
"""A gradient noise scale of fewer samples is rounding: the pushes were of the same samples."""
_UNTROUBLED = (daemon_states.RUNNING, daemon_states.QUEUED)
REPORT_S = 0.5
ROW_S = 1.0
"""Interval between two rows of the run's time series (thinned out by `records/series.py`)."""
SMALL = 16
"""Up to so many daemons there is no pause after a status."""
PAUSE_S = 0.001
"""How much longer the pause between two writes of the status is for each daemon."""
RATE_S = 2.0
"""The window over which rates are measured."""


@dataclass(eq=False)
class StatusReport:
    run: RunState
    data: DataSupply
    lead: MethodLead
    progress: RunProgress
    leases: Leases
    checkpointing: Checkpointing
    evaluations: Evaluations
    totals: Totals
    links: LinkBytes
    settings: SettingChanges
    registration: Registration
    uploads: CheckpointMirror

    def __post_init__(self) -> None:
        self._row_due_at = self._pause_until = 0.0
        self._troubled = self.run.members.select(
            ("_state", "waits_for_host"),
            lambda d: d.state not in _UNTROUBLED and not d.key and not d.waits_for_host,
        )
        self._has_last_row = False
        """The last row is written: a short run may have hardly another one."""
        self._pace = Pace(RATE_S)
        self._few: tuple[tuple[JobFile, int, int] | None, str] = None, ""
        """What `few_rounds` has found, and of what."""

    def due_at(self) -> float:
        """A large run's status takes long: at many changes in a row it is not written each time."""
        return max(self.run.status_due_at, self._pause_until)

    def report(self, now: float) -> None:
        self.run.status_due_at = now + REPORT_S
        more = len(self.run.members.daemons) - SMALL
        self._pause_until = now + min(max(0, more) * PAUSE_S, REPORT_S)
        run, daemons = self.look(now)
        self.run.context.do(StatusSnapshot(run, daemons))
        is_last = not self._has_last_row and self._is_done()
        if is_last or (self.run.is_working and now >= self._row_due_at):
            self._row_due_at, self._has_last_row = now + ROW_S, is_last
            self.run.context.do(AddMetric(RUN, self.progress.steps, self._row(run), is_last))

    def _is_done(self) -> bool:
        """Whether the run has trained, and no step will follow."""
        end = self.run.shutdown
        return end is not None and end.is_shutting_down() and self.run.released_at is not None

    def _row(self, run: Json) -> Json:
        """A row of the run's time series (`records/series.py`), taken from what `status` shows."""
        workers = self.run.members.of_role("worker")
        return {
            "samples": run["samples"],
            "epoch": run["data_epoch"],
            "workers": sum(worker.state in daemon_states.AT_WORK for worker in workers),
            **run["totals"],
            "loss": run["loss"],
            "task": run["metrics"],
            "rates": run.get("rates", {}),
            "noise_scale": run.get("noise_scale"),
        }

    def look(self, now: float) -> tuple[Json, tuple[Json, ...]]:
        """The run's keys, and the daemons' rows."""
        steps_per_s, samples_per_s = self._rates(now)
        lead, progress, checkpointing = self.lead, self.progress, self.checkpointing
        daemons = self.run.members.daemons.values()
        over = self.run.shutdown is not None and self.run.shutdown.is_leaving()
        newest = self.evaluations.newest
        run = {
            "state": self.run.state,
            "reason": self.run.reason,
            "step": progress.steps,
            "samples": progress.samples,
            "steps_per_s": steps_per_s,
            "samples_per_s": samples_per_s,
            "data_epoch": round(progress.epochs_done(), 4),
            "progress": self._progress(now),
            "loss": progress.loss,
            "metrics": dict(progress.metrics),
            **evaluated.keys(newest),
            "finish": self.evaluations.finished,
            "target_error": self.evaluations.out_of_reach,
            "loss_noise": lead.side.loss_noise(),
            "few_rounds": self.few_rounds(),
            "ready_at": self.run.released_at,
            "updated_at": now,
            "ended_at": now if over else None,
            "waiting": self.waiting(now),
            "checkpoint_error": checkpointing.last_error,
            "saving": checkpointing.to_json(),
            "totals": self.totals.look(now, is_working=self.run.is_working),
            "settings": {d.name: d.settings for d in daemons if d.settings},
        }
        if links := self.links.look():
            run[LINKS] = links
        if len(bounds := self.registration.bounds) > 2:
            run["shards"] = [hi - lo for lo, hi in pairwise(bounds)]
        if figures := lead.side.figures() | (dict(newest.method) if newest else {}):
            run["method"] = figures
        if self.data.batch_size:
            run["batch_size"] = self.data.batch_size
        if rates := self._learning_rates():
            run["rates"] = rates
        if uneven := self.settings.uneven():
            run["uneven"] = uneven
        if (noise := self._noise_scale()) is not None and noise >= NOISE_MIN:
            run["noise_scale"] = round(noise, 1)
        if checkpointing.newest is not None:
            run["checkpoint"] = checkpointing.newest
        if (mirror := self.uploads.to_json()) is not None:
            run["mirror"] = mirror
        run["problems"] = [p.to_json() for p in problems.find(self.run, run, now)]
        run["problems"] += [p.to_json() for p in self.uploads.problems(now)]
        return run, tuple(d.to_json() for d in daemons if d.role != GUEST)

    def few_rounds(self) -> str:
        """That the run has too few rounds, and what to set; "" if not, or if that is unknown."""
        if not self.data.is_open:
            return ""
        workers = self.run.members.of_role("worker")
        set_now = [w.settings.get(rounds.KEY) for w in workers if w.settings]
        steps = min((steps for steps in set_now if isinstance(steps, int)), default=0)
        of = (self.run.job, self.data.dataset.samples, steps)
        if of != self._few[0]:  # It looks at all places of workers.
            found = rounds.few(*of)
            self._few = of, found.text() if found is not None else ""
        return self._few[1]

    def _learning_rates(self) -> Json:
        """The effective rates, each as reported by the first daemon that has it: what a schedule
        has made of it, else the setting.
        """
        reports = [daemon.metrics for daemon in self.run.members.daemons.values()]
        found: Json = {}
        for reported in [*reports, *(report.get("settings") for report in reports)]:
            for key in ("lr", "inner_lr"):
                value = values.number(reported.get(key)) if isinstance(reported, dict) else None
                if value is not None:
                    found.setdefault(key, value)
        return found

    def _noise_scale(self) -> float | None:
        """The gradient noise scale in samples; None until all servers have measured their parts."""
        servers = self.run.members.of_role("server")
        reported = [server.metrics.get("method") for server in servers]
        parts = [of.get("noise_parts") if isinstance(of, dict) else None for of in reported]
        known = [(part[0], part[1]) for part in parts if isinstance(part, list)]
        return noise_scale(known) if len(known) == len(parts) else None

    def health(self) -> tuple[str, str]:
        """The state of a run that trains, and the unhealthy daemons as the reason."""
        names = [daemon.name for daemon in self._troubled.first(NAMED_MAX)]
        more = len(self._troubled) - NAMED_MAX
        names += [f"and {more} more"] if more > 0 else []
        return "degraded" if names else "running", ", ".join(names)

    def waiting(self, now: float) -> str:
        """The daemons that the run waits for now, and why; "" if for none."""
        end = self.run.shutdown
        if end is not None:
            pending = end.pending()
            return f"{', '.join(pending)} ({end.step})" if pending else ""
        if self.run.state != "starting":
            return self.leases.held_back(now)
        return self.unready() or self.run.lacking()

    def unready(self) -> str:
        """The daemons that are not ready and that the others wait for, and what they are doing."""
        daemons = [d for d in self.run.members.daemons.values() if not d.key]
        late = [d for d in daemons if d.state in ("starting", "backoff")]
        causes = [d for d in late if not d.waiting_for] or late
        doing: dict[str, list[str]] = {}
        for daemon in causes:
            doing.setdefault(daemon.phase or daemon.state, []).append(daemon.name)
        return ", ".join(f"{', '.join(names)} ({what})" for what, names in doing.items())

    def not_ready(self) -> str:
        """Why a run fails that was not ready in time."""
        text = f"not ready in time; waiting for {self.unready()}"
        error = self.run.context.unwritten
        return f"{text}; the run's database cannot be written: {error}" if error else text

    def _rates(self, now: float) -> tuple[float | None, float | None]:
        """Steps and samples per second; None while there is nothing to measure."""
        if self.run.released_at is None:
            return None, None
        rates = self._pace.look(now, (self.progress.steps, self.progress.samples))
        return (None, None) if rates is None else (round(rates[0], 2), round(rates[1], 2))

    def _progress(self, now: float) -> float | None:
        """Progress of the run, 0..1: by its data or by its time, whichever ends it first."""
        seconds = self.run.job.job.stop.seconds
        by_data = self.progress.fraction()
        if seconds is None or self.run.released_at is None:
            return by_data
        return max(by_data or 0.0, min(1.0, (now - self.run.released_at) / seconds))


# ---------------------------------------------------------------- what daemons report


@dataclass(eq=False)
class Reports(CoordinatorPart):
    leases: Leases
    evaluations: Evaluations
    failure_detector: FailureDetector
    totals: Totals
    links: LinkBytes
    recutting: Recutting

    def heard(self, daemon: Daemon, peer: Peer, now: float) -> None:
        """A daemon is alive. If its message came over a new connection, messages sent over the old
        one may be lost: resend them.
        """
        if peer != daemon.peer:
            self.context.retries.again(daemon.name, now, now)
        daemon.heard(peer, now)

    def on_report(self, peer: Peer, report: m.Report, now: float) -> None:
        """A heartbeat, with a report for `status`; the answer shows that we are alive."""
        daemon = self.run.members.get(report.name, report.incarnation)
        if daemon is None or not daemon.alive:
            self.context.send(peer, m.Dismiss(f"{report.name} has been replaced"))
            return
        self.heard(daemon, peer, now)
        if daemon.state in daemon_states.AT_WORK:
            is_stuck = "stuck_s" in report.metrics
            daemon.change_state(daemon_states.SLOW if is_stuck else daemon_states.RUNNING)
        daemon.report(report.phase, report.waiting_for, now)
        daemon.metrics = report.metrics
        if daemon.role == "worker":
            self.totals.count(daemon.name, daemon.incarnation, report.metrics)
            daemon.metrics = self.links.count(daemon, report.metrics)
            self.recutting.bandwidths.count(daemon, report.metrics)
            self.leases.on_report(daemon, now)
        self.evaluations.on_report(daemon, now)
        self.context.send(daemon.name, m.Heard())
        if daemon.role == "agent":
            if not daemon.registered:
                # An earlier coordinator has welcomed it, and could not record that.
                self.context.send(daemon.name, m.RegisterAgain())
            self.failure_detector.compare(daemon, report.metrics.get("children"), now)
            return
        if daemon.role == "server":
            if self.run.shutdown is None and (last := report.metrics.get("last_checkpoint")):
                # It has failed, or the coordinator that asked for it could not record the end.
                self.context.send(daemon.name, m.Reopen(last))
            self.recutting.on_report(daemon, report.metrics)
            self.control.notify_members(daemon)
        elif "step" in report.metrics:
            # It trains, although its request for data is not on record.
            self.is_at_work(daemon, now)
        if self.run.is_working:
            step = report.metrics.get("step") or report.metrics.get("version")
            step = step if isinstance(step, int) and step < 2**63 else 0
            self.context.do(AddMetric(report.name, step, daemon.metrics))

    def is_at_work(self, worker: Daemon, now: float) -> None:
        """A worker has asked for data: it takes part, or drains at once if the run ends."""
        if not worker.asked_for_data:
            worker.asked_for_data = True
            if self.run.shutdown is None or self.run.shutdown.needs(worker):
                worker.change_state(daemon_states.RUNNING)
            self.control.notify_members()
        if self.run.shutdown is not None:
            self.run.shutdown.drain_late(worker, now)

    def on_evaluated(self, peer: Peer, message: m.Evaluated, now: float) -> None:
        """Metrics of an evaluation; they may end the run."""
        found = self.evaluations.on_evaluated(message, now)
        if found is None:
            return
        if found.metrics:
            self.context.do(AddMetric(EVALUATION, found.step, found.to_json()))
            text = f"step {found.step}: {values.measured(found.metrics)}"
            self.context.event("evaluation", message.name, text, **found.to_json())
        target = self.evaluations.target
        if target is not None and target.is_reached(found.metrics):
            self.control.end("finished", f"the target {target} is reached", now)
        elif target is not None and not message.error:
            self._report_out_of_reach(target.missing_in(message.metrics), message.name, now)

    def _report_out_of_reach(self, why: str, name: str, now: float) -> None:
        """A run that nothing else would end fails at once. why: "" if the target has its metric."""
        if why and why != self.evaluations.out_of_reach:
            self.context.event("target", name, why)
        self.evaluations.out_of_reach = why
        stop = self.run.job.job.stop
        if why and not (stop.epochs or stop.steps or stop.samples or stop.seconds):
            hint = (
                "correct target in [job], or give stop another condition as well, and start again"
            )
            self.control.end("failed", f"{why}; {hint}", now)
