"""TensorBoard's files and Prometheus' endpoint, read by their own readers."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from recorded import START, row
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from daemons.coordinator import metrics_server, prometheus
from daemons.coordinator.prometheus import Prometheus
from daemons.coordinator.records import Exporter, export
from daemons.coordinator.tensorboard import FOLDER, TensorBoard
from dlctl.job.config import Job, JobFile, Log
from dlctl.records.evaluated import Result
from dlctl.records.series import EVALUATION

PATIENCE_S = 30.0
DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "dashboard.json"
RUN: dict[str, Any] = {
    "state": "running", "step": 120, "samples": 1200, "loss": 0.5, "data_epoch": 1.5,
    "progress": 0.25, "samples_per_s": 99.5, "metrics": {"error": 0.125},
    "evaluation": {"accuracy": 0.75}, "evaluation_step": 100, "method": {"replicas": 4.0},
    "checkpoint": {"at": START},
    "links": {"agent-1": {"host": "h1", "out_bytes": 30, "in_bytes": 40}},
    "totals": {"seconds": 12.0, "push_bytes": 10, "fetch_bytes": 20, "pushes": 4,
               "staleness_sum": 6},
}  # fmt: skip
WORKER = {
    "name": "worker-0", "role": "worker", "state": "running", "restarts": 2,
    "metrics": {"samples": 600, "push_bytes": 10, "fetch_bytes": 20},
}  # fmt: skip


def test_tensorboard_reads_what_several_coordinators_have_written(tmp_path: Path) -> None:
    """The second one goes on from a checkpoint at step 20; TensorBoard forgets what was behind."""
    first = TensorBoard(tmp_path)
    for second in range(6):
        first.add_row(*row(second, second * 10))
    first.add_row(START + 6, EVALUATION, 30, Result(30, {"accuracy": 0.5}).to_json())
    first.add_row(START + 6, "worker-0", 30, {"samples": 1})
    first.close("finished")
    second_one = TensorBoard(tmp_path)
    second_one.add_row(*row(7, 20, loss=float("nan")))
    second_one.add_row(*row(8, 40, task={"error": 0.25}))
    second_one.close("finished")
    found = EventAccumulator(str(tmp_path / FOLDER))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [0, 10, 40]
    assert [event.step for event in found.Scalars("rate/lr")] == [0, 10, 20, 40]
    assert found.Scalars("task/error")[0].value == 0.25
    assert found.Scalars("run/samples_per_s")[0].value == 100.0
    assert found.Scalars("run/staleness")[0].value == 3.0


def test_a_disk_that_takes_no_event_files_is_one_warning(tmp_path: Path, caplog) -> None:
    (tmp_path / FOLDER).write_text("not a directory")
    written = TensorBoard(tmp_path)
    written.add_row(*row(1, 10))
    written.add_row(*row(2, 20))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    (tmp_path / FOLDER).unlink()
    written.add_row(*row(3, 30))
    written.close("finished")
    found = EventAccumulator(str(tmp_path / FOLDER))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [30]


def test_an_exporter_that_fails_is_left_out_and_no_run_ends_by_it(tmp_path: Path, caplog) -> None:
    exporters: list[Exporter] = [TensorBoard(tmp_path)]
    export(exporters, lambda exporter: exporter.add_row(START, "run", 1, {"samples": "many"}))
    assert exporters == []
    assert [record.message for record in caplog.records] == [
        "TensorBoard has failed; training continues"
    ]
    assert not (tmp_path / FOLDER).exists()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture
def served() -> Iterator[Prometheus]:
    log = Log(prometheus_port=free_port())
    exporter = Prometheus("digits-7f3a", JobFile(job=Job(name="digits", task="t.py:t"), log=log))
    exporter.take_snapshot(RUN, [WORKER])
    exporter.add_row(*row(1, 10))
    yield exporter
    exporter.close("finished")


def scrape(exporter: Prometheus) -> str:
    address, port = exporter._where
    with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_prometheus_parses_what_it_scrapes(served: Prometheus) -> None:
    served.tend()
    families = list(text_string_to_metric_families(scrape(served)))
    samples = {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}
    assert samples[("dlctl_steps_total",)] == 120
    assert samples[("dlctl_loss",)] == 0.5
    assert samples[("dlctl_staleness_sum",)] / samples[("dlctl_staleness_count",)] == 1.5
    assert samples[("dlctl_evaluation", "accuracy")] == 0.75
    assert samples[("dlctl_evaluation_step",)] == 100
    assert samples[("dlctl_method", "replicas")] == 4.0
    assert samples[("dlctl_link_bytes_total", "agent-1", "out", "h1")] == 30
    assert samples[("dlctl_link_bytes_total", "agent-1", "in", "h1")] == 40
    assert samples[("dlctl_learning_rate", "lr")] == 0.1
    assert samples[("dlctl_daemon_up", "worker-0", "worker")] == 1.0
    assert samples[("dlctl_state", "running")] == 1.0
    assert samples[("dlctl_checkpoint_timestamp_seconds",)] == START
    assert {family.documentation != "" for family in families} == {True}
    known = {family.name for family in families} | {name for name, *_ in samples}
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for expr in asked for name in re.findall(r"dlctl_\w+", expr)}
    assert len(named) >= 10
    assert named <= known


def test_a_port_that_is_taken_is_tried_again_and_a_client_that_says_nothing_given_up(
    served: Prometheus, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(prometheus, "RETRY_S", 0.0)
    monkeypatch.setattr(metrics_server, "REQUEST_S", 0.2)
    with socket.create_server(served._where):
        served.tend()
        served.tend()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert os.strerror(errno.EADDRINUSE) in served.trouble
    served.tend()
    assert served.trouble == ""
    with clients(served, 1) as (silent,):
        assert is_dropped(silent)


@contextmanager
def clients(exporter: Prometheus, count: int) -> Iterator[list[socket.socket]]:
    """So many connections that say nothing, the oldest one first."""
    with ExitStack() as stack:
        found = [socket.create_connection(exporter._where, PATIENCE_S) for _ in range(count)]
        yield [stack.enter_context(one) for one in found]


@contextmanager
def dripping(exporter: Prometheus, count: int) -> Iterator[list[socket.socket]]:
    """So many clients of whose requests a byte comes now and then, and no end."""
    is_over = threading.Event()

    def drip(found: list[socket.socket]) -> None:
        while not is_over.wait(0.02):
            for one in found:
                with suppress(OSError):  # It was dropped.
                    one.send(b"G")

    with clients(exporter, count) as found:
        thread = threading.Thread(target=drip, args=(found,))
        thread.start()
        try:
            yield found
        finally:
            is_over.set()
            thread.join()


def is_dropped(client: socket.socket) -> bool:
    with suppress(ConnectionResetError):
        return client.recv(1) == b""
    return True


def test_others_are_served_while_clients_drip(served: Prometheus, monkeypatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_S", 1000.0)
    served.tend()
    threads = threading.active_count()
    with dripping(served, 20):
        assert threading.active_count() == threads + 1, "only the one that drips"
        assert "dlctl_loss 0.5" in scrape(served)


def test_a_client_whose_request_does_not_end_is_dropped_though_it_sends(
    served: Prometheus, monkeypatch
) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_S", 0.2)
    served.tend()
    with dripping(served, 1) as (client,):
        assert is_dropped(client)
    with clients(served, 1) as (endless,):
        with suppress(OSError):
            endless.sendall(b"GET /" + b"x" * 1_000_000)
        assert is_dropped(endless)
    assert "dlctl_loss 0.5" in scrape(served)


def test_of_too_many_clients_the_oldest_is_dropped(served: Prometheus, monkeypatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_S", 1000.0)
    monkeypatch.setattr(metrics_server, "CLIENTS_MAX", 4)
    served.tend()
    with clients(served, 5) as (oldest, *others):
        assert is_dropped(oldest)
        assert "dlctl_loss 0.5" in scrape(served)
        assert is_dropped(others[0]), "for the scrape"
        others[-1].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert others[-1].recv(12) == b"HTTP/1.0 200"
