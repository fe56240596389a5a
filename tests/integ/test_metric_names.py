"""A task's metrics have all the names that dlctl uses itself, and odd ones: no sink loses one."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from contextlib import closing
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from workplace import TASK, Workplace

from daemons.coordinator.prometheus import COUNTERS, GAUGES, Prometheus
from dlctl.job.config import Job, JobFile, Log
from dlctl.observe import history, plot
from dlctl.observe.tags import LINES
from dlctl.records.series import EVALUATION, RUN
from dlctl.roles.protocol.limits import METRIC_NAME_CHARS_MAX, METRICS_MAX
from dlctl.runs import checkpoints
from dlctl.runs.database import RunDb
from dlctl.util.names import MEASURED
from dlctl.util.text import escape
from dlctl.util.values import _TIME_KEYS

OURS = {
    *LINES, *GAUGES, *COUNTERS, *MEASURED, *_TIME_KEYS,
    # Columns of a series, keys of the run, of an event and of a manifest.
    "step", "samples", "epoch", "pushes", "staleness_sum", "rates", "ready_at", "evaluation_step",
    "consensus_distance", "replicas", "number", "state", "kind", "daemon", "worker-0", "version",
}  # fmt: skip
ODD = [
    "", " ", "val loss", "a/b", "task.loss", "evaluation.loss", 'say "hi"', "a 1, b", "\\n", "<b>&",
    "line\nfeed", "\x1b[31m", "\u202e", "é∞😀", "{x=1}", "train/loss", "x" * METRIC_NAME_CHARS_MAX,
]  # fmt: skip
NAMES = [*sorted(OURS), *ODD]
FURTHER = {name: 1000.0 + number for number, name in enumerate(NAMES)}
EVALUATED = {name: 2000.0 + number for number, name in enumerate(NAMES)}
"""Whole numbers, which their running means and float32 represent exactly."""
LOSS = "return functional.cross_entropy(model(points), label)"
METRICS = f"""return functional.cross_entropy(model(points), label), {FURTHER!r}

    def finish(self, model, metrics):
        return repr(metrics)
"""
ACCURACY = r"return \{\{\"accuracy\".*"


@pytest.fixture(scope="module")
def finished(shared_place: Workplace) -> Workplace:
    """A run that has ended by its target: the metric "step"."""
    place = shared_place
    assert len(NAMES) <= METRICS_MAX
    text = re.sub(ACCURACY, lambda _: "return EVALUATED", TASK.replace(LOSS, "return LOSS"))
    text = text.format(pause_s=0.0, samples=256).replace("return LOSS", METRICS)
    place.task(text.replace("return EVALUATED", f"return {EVALUATED!r}"))
    place.job(
        stop=f'{{ epochs = 20, target = "step >= {EVALUATED["step"]:g}" }}',
        more='best = "loss max"\n[log]\ntensorboard = true\n',
    )
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 0, ended.err
    place.nothing_left()
    return place


def status(place: Workplace) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(place.dlctl("status", "--json").out)
    return found


def test_status_has_them_beside_its_own(finished: Workplace) -> None:
    found = status(finished)
    assert found["reason"].startswith("the target")
    assert found["metrics"] == FURTHER
    assert found["evaluation"] == EVALUATED
    assert 0 < found["evaluation_step"] <= found["step"] < 1000
    assert 0.0 < found["loss"] < 10.0
    (worker,) = (row["metrics"] for row in found["daemons"] if row["role"] == "worker")
    assert worker["task"] == FURTHER
    assert 0 < worker["step"] < 1000
    assert found["finish"]["text"] == repr(EVALUATED)


def test_its_tables_show_each_name_once_and_whole(finished: Workplace) -> None:
    lines = finished.dlctl("status").out.splitlines()
    assert all(line.isprintable() for line in lines)
    (evaluation,) = (line for line in lines if line.split()[0] == "evaluation")
    for shown, table in ((lines[0], FURTHER), (evaluation, EVALUATED)):
        for name, value in table.items():
            is_plain = re.fullmatch(r"[^\s,\"]+( [^\s,\"]+)*", name)
            quoted = name if is_plain else json.dumps(name, ensure_ascii=False)
            assert f"{escape(quoted)} {value:.4g}" in shown
    assert re.search(r"  loss \d\.\d+  task ", lines[0])


def test_the_event_has_them(finished: Workplace) -> None:
    out = finished.dlctl("events", "--kind", "evaluation", "--json").out
    for event in map(json.loads, out.splitlines()):
        assert event["data"]["metrics"] == EVALUATED
        assert event["data"]["step"] < 1000
        assert event["at"].endswith("Z")
    text = finished.dlctl("events", "--kind", "evaluation").out
    assert len(text.splitlines()) == len(out.splitlines()) > 0


def test_the_series_have_them(finished: Workplace) -> None:
    with closing(RunDb(finished.directory, readonly=True)) as db:
        assert [row["task"] for row in db.metrics(RUN)][-1] == FURTHER
        rows = [*db.metrics(EVALUATION)]
    assert {row["metrics"] == EVALUATED and row["step"] < 1000 for row in rows} == {True}


def test_tensorboard_has_them(finished: Workplace) -> None:
    found = EventAccumulator(str(finished.directory / "tensorboard")).Reload()
    values = {tag: found.Scalars(tag)[-1].value for tag in found.Tags()["scalars"]}
    assert {name: values[f"task/{name}"] for name in NAMES} == FURTHER
    assert {name: values[f"eval/{name}"] for name in NAMES} == EVALUATED
    assert values["train/loss"] < 10.0
    assert values["rate/lr"] == pytest.approx(0.1)


def test_prometheus_has_them(finished: Workplace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = JobFile(job=Job(name="clouds", task="train.py:task"), log=Log(prometheus_port=port))
    exporter, run = Prometheus("clouds-1", job), finished.run()
    exporter.take_snapshot(run, run.pop("daemons"))
    exporter.tend()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}
    finally:
        exporter.close("finished")
    for family, table in (("dlctl_task", FURTHER), ("dlctl_evaluation", EVALUATED)):
        samples = families[family].samples
        assert {sample.labels["metric"]: sample.value for sample in samples} == table
    assert families["dlctl_loss"].samples[0].value < 10.0


def test_the_report_has_them(finished: Workplace) -> None:
    page = finished.path / "page.html"
    ended = finished.dlctl("report", "-o", str(page))
    assert ended.code == 0, ended.err
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page.read_text(), re.S)[0])
    charts = {chart["title"]: chart["lines"] for chart in data["charts"]}
    assert len(charts) == len(data["charts"])
    for kind, table in (("Task", FURTHER), ("Evaluation", EVALUATED)):
        for name, value in table.items():
            (line,) = charts[escape(f"{kind}: {name}")]
            assert (line["name"], line["y"][-1]) == (escape(name), value)
    assert charts["Loss"][0]["y"][-1] < 10.0


def test_each_can_be_plotted(finished: Workplace) -> None:
    found = history.read(finished.directory)
    for name in NAMES:
        assert plot.curve(found, f"task.{name}", "steps")[1][-1] == FURTHER[name]
        assert plot.curve(found, f"evaluation.{name}", "seconds")[1][-1] == EVALUATED[name]
    assert plot.curve(found, "loss", "steps")[1][-1] < 10.0
    assert plot.curve(found, "val loss", "steps")[1][-1] == FURTHER["val loss"]
    assert plot.curve(found, "task.task.loss", "steps")[1][-1] == FURTHER["task.loss"]
    picture = str(finished.path / "plot.svg")
    ended = finished.dlctl("plot", "--y", "task.line\nfeed", "-o", picture)
    assert ended.code == 0, ended.err


def test_the_checkpoint_has_them(finished: Workplace) -> None:
    for manifest in checkpoints.complete(finished.directory).values():
        assert manifest["evaluation"] == EVALUATED
        assert manifest["evaluation_step"] < 1000
    rows = json.loads(finished.dlctl("checkpoint", "ls", "--json").out)["checkpoints"]
    assert {row["is_best"] for row in rows} == {True}
    assert [row["evaluation"] for row in rows] == [EVALUATED]
    assert len(finished.dlctl("checkpoint", "ls").out.splitlines()) == 2
