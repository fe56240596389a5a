"""Serves the run's metrics to Prometheus, at /metrics of a separate port.

A client gets the current values of `status`, from a thread that never blocks the coordinator.
Names are `dlctl_...`, in base units. Counters of daemons restart with each of their processes,
those of the run never do. examples/grafana has a dashboard for them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
    SummaryMetricFamily,
)

from daemons.coordinator.metrics_server import MetricsServer
from daemons.coordinator.records import Exporter, Outcome
from dlctl import __version__
from dlctl.job.config import JobFile
from dlctl.records.series import RUN
from dlctl.roles.coordinator.members.daemon_states import ALIVE
from dlctl.roles.coordinator.run_state import NEXT
from dlctl.util.names import LINKS
from dlctl.wire.messages import Json

log = logging.getLogger("dlctl")
RETRY_S = 10.0
"""Interval between two attempts to bind a port that was in use."""
STATES = sorted({*NEXT, *(state for following in NEXT.values() for state in following)})
GAUGES = {
    "loss": ("loss", "Running mean of the training loss."),
    "data_epoch": ("epochs", "Passes over the dataset."),
    "progress": ("progress_ratio", "Progress of the run, 0 to 1."),
    "samples_per_s": ("samples_per_second", "Samples per second of all workers, now."),
    "noise_scale": ("noise_scale_samples", "Gradient noise scale."),
}
"""Key of the run -> name and help of its gauge."""
COUNTERS = {
    "push_bytes": ("push_bytes", "Bytes that workers have pushed."),
    "fetch_bytes": ("fetch_bytes", "Bytes that workers have fetched."),
    "seconds": ("work_seconds", "Time spent working."),
}
"""Key of the run's totals -> name and help of its counter."""
OF_WORKERS = {
    "samples": ("worker_samples", "Samples of a worker's process."),
    "push_bytes": ("worker_push_bytes", "Bytes that a worker's process has pushed."),
    "fetch_bytes": ("worker_fetch_bytes", "Bytes that a worker's process has fetched."),
}


class Prometheus(Exporter):
    def __init__(self, run_id: str, job: JobFile) -> None:
        self._info = {
            "run_id": run_id, "name": job.job.name, "method": job.algorithm.name,
            "version": __version__,
        }  # fmt: skip
        self._where = (job.log.prometheus_address, job.log.prometheus_port)
        self._newest: tuple[Json, Sequence[Json]] = ({}, ())
        self._rates: Json = {}
        """Learning rates in effect."""
        self._server: MetricsServer | None = None
        self._retry_at = 0.0
        self.trouble = ""
        """Why the port is not open; "" if it is."""

    def tend(self) -> None:
        """Start to listen unless already done; a failed attempt is retried after `RETRY_S`."""
        if self._server is not None or time.monotonic() < self._retry_at:
            return
        registry = CollectorRegistry(auto_describe=False)
        registry.register(cast(Any, self))  # any object with `collect`
        address, port = self._where
        try:
            self._server = MetricsServer(address, port, registry)
        except OSError as error:
            self._retry_at = time.monotonic() + RETRY_S
            if not self.trouble:
                self.trouble = f"cannot serve Prometheus at {address} port {port}: {error}"
                log.warning("%s; training continues, and dlctl retries", self.trouble)
            return
        self.trouble = ""
        log.info("serving Prometheus metrics at %s port %d", address, port)

    def close(self, outcome: Outcome | None) -> None:
        if self._server is not None:
            self._server.close()

    def add_row(self, at: float, name: str, step: int, values: Json) -> None:
        if name == RUN:
            self._rates = values["rates"]

    def take_snapshot(self, run: Json, daemons: Sequence[Json]) -> None:
        self._newest = run, daemons

    # ------------------------------------------------------------ in the thread

    def collect(self) -> Iterator[Metric]:
        run, daemons = self._newest
        info = InfoMetricFamily("dlctl", "The run.")
        info.add_metric([], self._info)
        yield info
        if run:
            yield from _of_run(run)
            yield _table("learning_rate", "Learning rates in effect.", "of", self._rates)
            yield from _of_daemons(daemons)


def _of_run(run: Json) -> Iterator[Metric]:
    state = StateSetMetricFamily("dlctl_state", "State of the run.")
    state.add_metric([], {name: name == run["state"] for name in STATES})
    yield state
    for key in ("step", "samples"):
        yield _counter(f"{key.removesuffix('s')}s", f"{key} of all workers.", run.get(key))
    for key, (name, text) in GAUGES.items():
        yield _gauge(name, text, run.get(key))
    totals = run.get("totals", {})
    for key, (name, text) in COUNTERS.items():
        yield _counter(name, text, totals.get(key))
    staleness = SummaryMetricFamily("dlctl_staleness", "Updates by others, for each push.")
    staleness.add_metric([], totals.get("pushes", 0), totals.get("staleness_sum", 0))
    yield staleness
    yield _links(run.get(LINKS) or {})
    yield _table("task", "What else the task's loss returns.", "metric", run.get("metrics") or {})
    text = "Newest evaluation of the model."
    yield _table("evaluation", text, "metric", run.get("evaluation") or {})
    yield _gauge("evaluation_step", "Step of the evaluated model.", run.get("evaluation_step"))
    yield _table("method", "Figures of the method.", "figure", run.get("method") or {})
    saved = run.get("checkpoint") or {}
    text = "When the newest checkpoint was made."
    yield _gauge("checkpoint_timestamp_seconds", text, saved.get("at"))


def _links(rows: Json) -> Metric:
    """The bytes of pushes and fetches between hosts."""
    text = "Bytes over the link of a host, those within a host not counted."
    counted = CounterMetricFamily("dlctl_link_bytes", text, labels=["agent", "host", "direction"])
    for agent, row in rows.items():
        for direction in ("out", "in"):
            counted.add_metric([agent, row["host"], direction], row[f"{direction}_bytes"])
    return counted


def _of_daemons(daemons: Sequence[Json]) -> Iterator[Metric]:
    labels = ["daemon", "role"]
    up = GaugeMetricFamily("dlctl_daemon_up", "Whether a daemon has a process.", labels=labels)
    restarts = CounterMetricFamily("dlctl_daemon_restarts", "Of a daemon.", labels=labels)
    for row in daemons:
        of = [row["name"], row["role"]]
        up.add_metric(of, float(row["state"] in ALIVE))
        restarts.add_metric(of, row["restarts"])
    yield from (up, restarts)
    workers = [row for row in daemons if row["role"] == "worker"]
    for key, (name, text) in OF_WORKERS.items():
        counted = CounterMetricFamily(f"dlctl_{name}", text, labels=["daemon"])
        for row in workers:
            if (value := _number(row["metrics"].get(key))) is not None:
                counted.add_metric([row["name"]], value)
        yield counted


def _gauge(name: str, text: str, value: Any) -> Metric:
    """A gauge with one sample; with none, if there is no value."""
    return GaugeMetricFamily(f"dlctl_{name}", text, value=_number(value))


def _counter(name: str, text: str, value: Any) -> Metric:
    return CounterMetricFamily(f"dlctl_{name}", text, value=_number(value))


def _table(name: str, text: str, label: str, values: Mapping[str, Any]) -> Metric:
    family = GaugeMetricFamily(f"dlctl_{name}", text, labels=[label])
    for key, value in values.items():
        if _number(value) is not None:
            family.add_metric([str(key)], value)
    return family


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) else None
