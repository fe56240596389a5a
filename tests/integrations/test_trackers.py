"""Runs of two workers in wandb and MLflow: one run of theirs, whatever dies in between."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from wandb_files import read_all
from workplace import ENDLESS, Workplace, opened

from dlctl.observe.history import point_of
from dlctl.records.series import RUN
from dlctl.runs.database import RunDb

PAUSE_S = 0.02
BEGIN_S = 90.0
"""A tracker's package is imported, and a database made, on a busy machine."""
SERVER_S = 240.0
"""It imports far more than a client, in two processes one after the other."""
LOSS, ACCURACY = "train/loss", "eval/accuracy"

LATER = """threading.Event().wait(PAUSE_S)
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 500:
            raise ValueError("enough")"""
"""In every worker, after some time."""


@pytest.fixture
def place() -> Iterator[Workplace]:
    with opened() as workplace:
        workplace.task(pause_s=PAUSE_S)
        yield workplace


def steps_on_record(place: Workplace) -> list[int]:
    """The steps of the run's own rows that have a loss, each once."""
    with closing(RunDb(place.directory, readonly=True)) as db:
        points = [point_of(row) for row in db.metrics(RUN)]
    return [step for step, _ in itertools.groupby(p.step for p in points if p.loss is not None)]


def only_run(store: str) -> Any:
    """The run in the experiment "clouds" of a store; there must be no other."""
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("clouds")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def steps_in(store: str, metric: str = LOSS) -> list[int]:
    history = MlflowClient(tracking_uri=store).get_metric_history(
        only_run(store).info.run_id, metric
    )
    return [each.step for each in sorted(history, key=lambda each: each.timestamp)]


def is_whole(found: list[int], recorded: list[int]) -> None:
    """No step twice, none in the wrong order, none of the run's own left out."""
    assert found == sorted(set(found))
    assert set(recorded) <= set(found)
    assert len(found) <= len(recorded) + 2  # A killed coordinator had sent what it had not stored.


def is_told(place: Workplace, store: str, status: str) -> None:
    """A tracker that is still starting at the end delivers after its coordinator."""
    place.until(f"it is {status}", lambda: only_run(store).info.status == status, BEGIN_S)


def has_begun(place: Workplace, *trackers: str) -> None:
    folder = place.directory / "trackers"

    def are_there() -> bool:
        return all((folder / f"{name}.json").exists() for name in trackers)

    place.until("the trackers have begun", are_there, BEGIN_S)


def more_steps(place: Workplace, count: int = 150) -> None:
    place.until_step(place.run().get("step", 0) + count, 90)


@pytest.mark.timeout(400)
def test_killed_stopped_and_resumed_it_is_one_run_of_each_tracker(place: Workplace) -> None:
    log = '[log]\nwandb = "offline"\nmlflow = "sqlite:///mlflow.db"\n'
    place.job(stop=ENDLESS, workers=2, more=log)
    store = f"sqlite:///{place.path}/mlflow.db"
    assert MlflowClient(tracking_uri=store).search_experiments()  # The database is there.
    place.start()
    has_begun(place, "wandb", "mlflow")
    more_steps(place)
    os.kill(place.pid("coordinator"), signal.SIGKILL)
    more_steps(place)
    assert only_run(store).info.status == "RUNNING"
    assert place.dlctl("stop").code == 0
    is_told(place, store, "KILLED")
    before = place.directory
    place.start()
    assert place.directory == before
    is_told(place, store, "RUNNING")
    more_steps(place)
    ended = place.dlctl("stop")
    assert ended.code == 0, ended.err
    is_told(place, store, "KILLED")
    is_whole(steps_in(store), steps_on_record(place))
    assert steps_in(store, ACCURACY)
    written = read_all(before)
    assert [(each.exit_code, each.is_preempted) for each in written] == [
        (1, True), (0, False), (0, False),
    ]  # fmt: skip
    assert {each.run_id for each in written} != {""}
    assert len({(each.run_id, each.project) for each in written}) == 1
    rows = [row for each in written for row in each.rows]
    is_whole([row["step"] for row in rows if LOSS in row], steps_on_record(place))
    assert any(ACCURACY in row for row in rows)
    numbers = [row["_step"] for row in rows]
    assert numbers == sorted(set(numbers))
    params = only_run(store).data.params
    assert params["algorithm.push_every_steps"] == "2"
    assert written[0].config["algorithm.push_every_steps"] == 2
    assert params["workers.count"] == "2"
    assert "tracker-failed" not in str(place.run()["problems"])
    place.nothing_left(BEGIN_S)


@contextmanager
def server(place: Workplace, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """An MLflow server at 127.0.0.1, whose store outlives it."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{place.path}/server.db", "--workers", "1"]
    with (place.path / "server.log").open("ab") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=said, cwd=place.path, start_new_session=True,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        )  # fmt: skip
    try:
        place.until("the server answers", lambda: _answers(port), SERVER_S)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def problems(place: Workplace) -> list[dict[str, Any]]:
    found = place.run().get("problems", [])
    return [problem for problem in found if problem["code"] == "tracker-failed"]


@pytest.mark.timeout(900)
def test_a_server_that_is_away_for_a_while_gets_all_rows(place: Workplace) -> None:
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    place.job(stop=ENDLESS, workers=2, more=f'[log]\nmlflow = "{address}"\n')
    with server(place, port):
        place.start()
        has_begun(place, "mlflow")
        more_steps(place)
    place.until("the problem is shown", lambda: problems(place), 120)
    assert "mlflow" in place.dlctl("status").out
    more_steps(place, 50)
    with server(place, port):
        place.until("the problem is over", lambda: not problems(place), 300)
        assert place.dlctl("stop").code == 0
        is_whole(steps_in(address), steps_on_record(place))
        assert only_run(address).info.status == "KILLED"
    assert len(place.events("tracker")) == 2
    place.nothing_left()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("outcome", ["finished", "failed"])
def test_the_end_of_a_run_is_told(place: Workplace, outcome: str) -> None:
    store = f"sqlite:///{place.path}/mlflow.db"
    assert MlflowClient(tracking_uri=store).search_experiments()  # The database is there.
    if outcome == "failed":
        path = place.path / "train.py"
        path.write_text(path.read_text().replace("threading.Event().wait(PAUSE_S)", LATER))
    log = '[log]\nwandb = "offline"\nmlflow = "sqlite:///mlflow.db"\n'
    place.job(stop="{ steps = 1500 }", workers=2, more=log)
    ended = place.dlctl("run", "job.toml", timeout_s=200)
    assert ended.code == (0 if outcome == "finished" else 7), ended.err
    is_told(place, store, outcome.upper())
    is_whole(steps_in(store), steps_on_record(place))
    (written,) = read_all(place.directory)
    assert (written.exit_code, written.is_preempted) == (int(outcome == "failed"), False)
    is_whole([row["step"] for row in written.rows if LOSS in row], steps_on_record(place))
    place.nothing_left(BEGIN_S)


@pytest.mark.timeout(200)
def test_a_password_in_the_environment_is_written_nowhere(place: Workplace) -> None:
    """Nobody listens at the address: what the package says about it is told as well."""
    secret = "hunter2hunter2"
    place.env["MLFLOW_TRACKING_URI"] = f"http://me:{secret}@127.0.0.1:{free_port()}"
    place.job(stop=ENDLESS, workers=2, more='[log]\nmlflow = "env:MLFLOW_TRACKING_URI"\n')
    place.start()
    place.until("the problem is shown", lambda: problems(place), BEGIN_S)
    shown = place.dlctl("status").out + place.dlctl("why").out + place.dlctl("logs").out
    assert place.dlctl("stop").code == 0
    assert "mlflow" in shown
    assert secret not in shown
    for path in _files(place.directory):
        assert secret.encode() not in path.read_bytes(), path
    place.nothing_left()


def _files(directory: Path) -> Iterator[Path]:
    yield from (path for path in directory.rglob("*") if path.is_file())
