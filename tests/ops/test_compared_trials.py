"""What `dlctl compare` asks the simulator for, and makes of its answers: nothing is simulated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlctl.errors import DlctlError, UsageError
from dlctl.ops import advise, compare, plain_runs, real_runs, run_figures, simulators
from dlctl.ops.compare import Plan
from dlctl.runs.snapshot import read_job
from dlctl.sim.request import LinkSpeed, SimulationRequest

JOB = """
[job]
name = "digits"
task = "train.py:task"
{stop}

[algorithm]
name = "{method}"

[workers]
count = 4
batch_size = 8
"""
SAMPLES = 6400
STEP_S = 0.25
Json = dict[str, Any]


class Simulator:
    """Answers as the process that simulates would; `fails` says which runs have an error."""

    def __init__(self) -> None:
        self.asked: list[tuple[SimulationRequest, Json]] = []
        """Requests, with the jobs in their directories."""
        self.fails: Callable[[Json], bool] = lambda job: False

    def ask(self, requests: Sequence[SimulationRequest]) -> list[Json]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: SimulationRequest) -> Json:
        job = read_job(Path(request.directory))
        self.asked.append((request, job))
        answer: Json = {"directory": request.directory}
        if request.step_s is None:
            return answer | {"measured": {"step_s": STEP_S}, "samples": SAMPLES}
        if self.fails(job):
            facts = {"message": "boom", "where": None, "hint": None}
            return answer | {"error": facts, "exit_code": 7}
        return answer | {"simulated": {}}

    @property
    def measured(self) -> list[Json]:
        return [job for request, job in self.asked if request.step_s is None]

    @property
    def trained(self) -> list[tuple[SimulationRequest, Json]]:
        return [(request, job) for request, job in self.asked if request.step_s is not None]


@pytest.fixture
def simulator(monkeypatch: pytest.MonkeyPatch) -> Simulator:
    found = Simulator()

    @contextmanager
    def opened(slots: int, where: Path) -> Iterator[Simulator]:
        yield found

    reached = {"seconds": 1.0, "bytes": 1.0, "samples": 1.0, "metrics": {"accuracy": 1.0}}
    figures = {"state": "finished", "reason": None, "evaluations": [reached]}
    monkeypatch.setattr(simulators, "opened", opened)
    monkeypatch.setattr(run_figures, "of_run", lambda directory: figures)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("task = None\n")
    return tmp_path / "job.toml"


def a_plan(
    file: Path, *methods: str, stop: str = "", own: str = "downpour", trials: int = 1, **more: Any
) -> Plan:
    file.write_text(JOB.format(stop=stop, method=own))
    request = SimulationRequest(
        directory="", slow=more.pop("slow", {}), link=more.pop("link", None)
    )
    plan = Plan(
        file=file, methods=methods, target="accuracy >= 0.9", changes={}, seeds=1, trials=trials,
        request=request,
    )  # fmt: skip
    return replace(plan, **more)


@pytest.mark.parametrize(
    ("stop", "limits"),
    [
        ("", {"epochs": 1}),
        ("stop = { steps = 40 }", {"steps": 40}),
        ('stop = { seconds = 9.0, target = "accuracy >= 0.5" }', {"seconds": 9.0}),
    ],
)
def test_every_run_stops_where_the_job_does_if_it_never_reaches_the_target(
    file: Path, simulator: Simulator, stop: str, limits: Json
) -> None:
    compare.compare(a_plan(file, "downpour", "torch", stop=stop), 1)
    assert len(simulator.trained) == 4
    for _, job in simulator.trained:
        found = {key: value for key, value in job["job"]["stop"].items() if value is not None}
        assert found == {**limits, "target": "accuracy >= 0.9"}


@pytest.mark.parametrize("stop", ['stop = { target = "accuracy >= 0.5" }', "stop = {}"])
def test_a_job_that_may_never_end_is_refused(file: Path, simulator: Simulator, stop: str) -> None:
    plan = a_plan(file, "downpour", stop=stop)
    for tried in (compare.compare, advise.advise):
        with pytest.raises(UsageError) as refused:
            tried(plan, 1)
        assert "job.stop.epochs" in str(refused.value.hint)
    assert simulator.asked == []
    compare.compare(replace(plan, changes={"job.stop.epochs": 2}), 1)
    assert {job["job"]["stop"]["epochs"] for _, job in simulator.trained} == {2}


def test_intervals_are_shortened_by_the_default_stop_and_by_its_first_limit(
    file: Path, simulator: Simulator
) -> None:
    _, record = compare.compare(a_plan(file, "diloco", trials=2), 1)
    assert record["trials"][0]["values"]["algorithm.local_steps"] == 10  # Of 200 steps.
    plan = a_plan(file, "diloco", trials=2, stop="stop = { steps = 100_000, epochs = 2 }")
    _, record = compare.compare(plan, 1)
    assert record["trials"][0]["values"]["algorithm.local_steps"] == 20


def test_a_tuned_value_that_is_not_valid_is_a_failed_trial(
    file: Path, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare.tuning, "RATE_FACTOR", 1e9)  # No job file takes such rates.
    _, record = compare.compare(a_plan(file, "sync", "downpour", trials=6), 1)
    tuned = [trial["values"]["optimizer.lr"] for trial in record["trials"] if trial["seed"] == 0]
    assert max(tuned) > 1e6
    assert len(simulator.trained) < len(record["trials"])
    assert record["failures"] == []
    assert all(job["optimizer"]["options"]["lr"] < 1e6 for _, job in simulator.trained)


@pytest.mark.parametrize(
    "method", ["easgd", "eamsgd", "easgd-atomic", "streaming-diloco", "decoupled-diloco"]
)
def test_no_trial_has_what_its_method_refuses(
    file: Path, simulator: Simulator, method: str
) -> None:
    _, record = compare.compare(a_plan(file, method, trials=8), 1)
    assert len(simulator.trained) == len(record["trials"])


def test_trials_that_fail_after_good_ones_discard_none(file: Path, simulator: Simulator) -> None:
    simulator.fails = lambda job: len(simulator.trained) > 4
    directory, record = compare.compare(a_plan(file, "sync", trials=5), 1)
    assert record["runs"] == {"sync": [None]}
    assert record["failures"] == [{"method": "sync", "seed": 1, "reason": "boom"}]
    assert record["tuned"]["sync"] in [trial["values"] for trial in record["trials"][:4]]
    assert (directory / compare.FILE).is_file()


def test_a_method_of_which_all_fails_leaves_the_others_in_the_table(
    file: Path, simulator: Simulator
) -> None:
    simulator.fails = lambda job: job["algorithm"]["name"] == "diloco"
    _, record = compare.compare(a_plan(file, "diloco", "sync", trials=2), 1)
    assert record["runs"]["diloco"] == [None]
    assert record["runs"]["sync"] != [None]


def test_if_all_fails_nothing_is_left(file: Path, simulator: Simulator) -> None:
    simulator.fails = lambda job: True
    with pytest.raises(DlctlError, match="boom"):
        compare.compare(a_plan(file, "diloco", "sync", trials=2), 1)
    assert not list(file.parent.glob("runs/*"))


def test_trials_that_have_ended_outlive_a_comparison_that_does_not_end(
    file: Path, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(compare.notes, "warn", said.append)

    def interrupted(job: Json) -> bool:
        if job["job"]["seed"] == 1:
            raise KeyboardInterrupt
        return False

    simulator.fails = interrupted
    with pytest.raises(KeyboardInterrupt):
        compare.compare(a_plan(file, "sync", trials=4), 1)
    (directory,) = file.parent.glob("runs/*")
    assert len(list(directory.glob("sync-*"))) == 5
    assert str(directory) in said[-1]


@pytest.mark.parametrize("methods", [("torch", "diloco"), ("diloco", "torch")])
@pytest.mark.parametrize(("own", "measured"), [("ssp", "ssp"), ("hogwild", "allreduce")])
def test_a_step_is_measured_with_the_job_s_method_and_workers(
    file: Path, simulator: Simulator, methods: tuple[str, ...], own: str, measured: str
) -> None:
    compare.compare(a_plan(file, *methods, own=own), 1)
    (job,) = simulator.measured
    assert (job["algorithm"]["name"], job["workers"]["count"]) == (measured, 4)
    assert {request.step_s for request, _ in simulator.trained} == {STEP_S}


def test_one_torch_process_is_no_slower_worker(file: Path, simulator: Simulator) -> None:
    slow = {"worker-0": 3.0}
    compare.compare(a_plan(file, "torch", "ddp", "sync", slow=slow), 1)
    by_workers = {
        (request.is_plain, job["workers"]["count"]): request.slow
        for request, job in simulator.trained
    }
    assert by_workers == {(True, 1): {}, (True, 4): slow, (False, 4): slow}


@pytest.mark.parametrize(
    "conditions", [{"slow": {"worker-0": 3.0}}, {"link": LinkSpeed.parse("1Gbit/s")}]
)
def test_real_runs_have_no_simulated_links_or_workers(
    file: Path, simulator: Simulator, conditions: Json
) -> None:
    with pytest.raises(UsageError, match="--real"):
        compare.compare(a_plan(file, "sync", is_real=True, **conditions), 1)
    assert simulator.asked == []


def test_a_real_run_that_cannot_start_is_one_that_has_failed(
    file: Path, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(start: Any, where: Path | str, *_: Any) -> Path:
        if isinstance(where, Path):
            where.mkdir()  # It stays: each run has one of its own.
        if start.job.algorithm.name != "diloco":
            raise DlctlError("no port is free")
        return file.parent

    monkeypatch.setattr(real_runs, "run", run)
    monkeypatch.setattr(plain_runs, "run", run)
    plan = a_plan(file, "torch", "sync", "diloco", is_real=True, seeds=2)
    _, record = compare.compare(plan, 1)
    assert [name for name, runs in record["runs"].items() if any(runs)] == ["diloco"]
    assert [each["method"] for each in record["failures"]] == ["torch", "torch", "sync", "sync"]
    with pytest.raises(DlctlError, match="no port"):
        compare.compare(a_plan(file, "torch", "sync", is_real=True), 1)


# ------------------------------------------------------------------ again


@pytest.fixture
def made(file: Path, simulator: Simulator) -> Path:
    directory, _ = compare.compare(a_plan(file, "sync", "torch"), 1)
    return directory / compare.FILE


def test_the_plan_of_a_comparison_comes_back(made: Path) -> None:
    record = compare.read(made)
    plan = compare.plan_of(record)
    assert (plan.methods, plan.samples, plan.request.step_s) == (("sync", "torch"), SAMPLES, STEP_S)
    _, again = compare.compare(plan, 1)
    assert not compare.differs(again, record)


def test_a_job_file_that_is_gone_or_is_another_is_named(made: Path, file: Path) -> None:
    record = compare.read(made)
    file.write_bytes(file.read_bytes() + b"# \xff\n")
    with pytest.raises(UsageError) as changed:
        compare.plan_of(record)
    file.unlink()
    with pytest.raises(UsageError) as gone:
        compare.plan_of(record)
    for error in (changed.value, gone.value):
        assert error.where == str(file)
        assert compare.FILE in str(error.hint)


@pytest.mark.parametrize(
    "change",
    [
        {"plan": None},
        {"plan": {}},
        {"plan": {"request": {"link": {"rate": 1}}}},
        {"plan": {"request": {"of_the_future": 1}}},
        {"plan": {"of_the_future": 1}},
        {"plan": {"seeds": "many"}},
        {"job": None},
        {"runs": None},
        {"runs": {"sync": [{}]}},
    ],
)
def test_a_record_of_another_version_is_refused_before_anything_runs(
    made: Path, change: Json
) -> None:
    record = json.loads(made.read_text())
    made.write_text(json.dumps(_changed(record, change)))
    with pytest.raises(UsageError) as refused:
        compare.read(made)
    assert refused.value.where == str(made)


def test_a_record_with_a_schema_alone_is_refused(made: Path) -> None:
    made.write_text(json.dumps({"schema": compare.SCHEMA}))
    with pytest.raises(UsageError):
        compare.read(made)


def _changed(values: Any, change: Any) -> Any:
    if not change or not isinstance(change, dict) or not isinstance(values, dict):
        return change
    return values | {key: _changed(values.get(key), value) for key, value in change.items()}
