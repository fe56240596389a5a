"""What a sweep does with its trials: which it asks for, ends, tries again, and calls the best. The
runs are made up: a function of the job says how each one ends.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dlctl.errors import DlctlError, UsageError
from dlctl.job import schedule
from dlctl.job.config import JobFile
from dlctl.ops import real_runs, run_figures, sweep, swept_jobs
from dlctl.ops.cases import Start
from dlctl.runs import sweep_database
from dlctl.study import points
from dlctl.study.samplers import Known
from dlctl.util import notes

JOB = """
[job]
name = "a"
task = "train.py:task"
stop = { steps = 900 }
[optimizer]
name = "sgd"
lr = 0.1
[workers]
batch_size = 8
"""
Json = dict[str, Any]
Score = Callable[[JobFile], "float | None"]


class Sweeps:
    """A job file, and runs that end at once, by `score`: the metric; None: the run fails."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.started: list[JobFile] = []
        self.score: Score = lambda job: float(job.optimizer.options["lr"])
        self.reason = "no space left on device"
        self.directory = Path()

    def run_on(self, start: Start, name: str, stopped: threading.Event) -> Path:
        self.started.append(start.job)
        value = self.score(start.job)
        directory = self.directory / f"run-{len(self.started):03d}"
        directory.mkdir()
        rows = [] if value is None else [{"metrics": {"loss": value}}]
        state, reason = ("failed", self.reason) if value is None else ("finished", "")
        figures = {"state": state, "reason": reason, "evaluations": rows}
        (directory / "figures.json").write_text(json.dumps(figures))
        return directory

    def begin(self, *words: str, **plan: Any) -> None:
        given = {"trials": 0, "metric": "loss min", "sampler": "grid", "pruner": "none"}
        given |= {"seeds": 1, "seed": 0, **plan}
        self.directory = sweep.begin(sweep.SweepPlan(str(self.file), words, **given))

    def resume(self, slots: int = 1) -> None:
        sweep.resume(self.directory, slots)

    def trials(self) -> list[Json]:
        return sweep_database.read(self.directory)[1]

    def states(self) -> list[str]:
        return [trial["state"] for trial in self.trials()]

    def edit(self, old: str, new: str) -> None:
        text = self.file.read_text()
        assert old in text
        self.file.write_text(text.replace(old, new))


@pytest.fixture
def sweeps(own_place: Path, monkeypatch: pytest.MonkeyPatch) -> Sweeps:
    (own_place / "train.py").write_text("task = None\n")
    (own_place / "job.toml").write_text(JOB)
    made = Sweeps(own_place / "job.toml")
    monkeypatch.setattr(real_runs, "run_on", made.run_on)
    monkeypatch.setattr(
        run_figures, "of_run", lambda path: json.loads((path / "figures.json").read_text())
    )
    return made


@pytest.fixture
def notes_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(notes, "_note", found.append)
    monkeypatch.setattr(notes, "_warn", found.append)
    return found


# ---------------------------------------------------------------- what can be swept


@pytest.mark.parametrize(
    ("stop", "pruner"),
    [
        ('{ target = "loss <= 0.1" }', "none"),
        ('{ target = "loss <= 0.1" }', "halving"),
        ('{ target = "loss <= 0.1", seconds = 10 }', "halving"),
    ],
)
def test_a_trial_that_would_not_end_or_not_be_shorter_is_refused(
    sweeps: Sweeps, stop: str, pruner: str
) -> None:
    sweeps.edit("{ steps = 900 }", stop)
    with pytest.raises(UsageError) as refused:
        sweeps.begin("optimizer.lr=0.1,0.2", pruner=pruner)
    assert refused.value.where == "job.stop"
    assert "steps" in str(refused.value.hint)
    assert not list(sweeps.file.parent.glob("runs/*"))


def test_a_target_with_a_limit_beside_it_can_be_swept(sweeps: Sweeps) -> None:
    sweeps.edit("{ steps = 900 }", '{ target = "loss <= 0.1", seconds = 60 }')
    sweeps.begin("optimizer.lr=0.1,0.2")


# ---------------------------------------------------------------- seeds


def test_the_best_point_is_that_of_the_best_mean(sweeps: Sweeps) -> None:
    luck = {(0.1, 0): 0.0, (0.1, 1): 9.0, (0.2, 0): 1.0, (0.2, 1): 2.0}
    sweeps.score = lambda job: luck[job.optimizer.options["lr"], job.job.seed]
    sweeps.begin("optimizer.lr=0.1,0.2", seeds=2)
    sweeps.resume()
    best = points.best(sweeps.trials())
    assert best is not None
    assert (best.values, best.score) == ({"optimizer.lr": 0.2}, 1.5)


def test_a_point_with_a_failed_seed_is_not_the_best(sweeps: Sweeps) -> None:
    luck = {(0.1, 0): 0.0, (0.1, 1): None, (0.2, 0): 1.0, (0.2, 1): 2.0}
    sweeps.score = lambda job: luck[job.optimizer.options["lr"], job.job.seed]
    sweeps.begin("optimizer.lr=0.1,0.2", seeds=2)
    sweeps.resume()
    assert sweeps.states() == ["done", "failed", "done", "done"]
    best = points.best(sweeps.trials())
    assert best is not None
    assert best.values == {"optimizer.lr": 0.2}
    assert points.best(sweeps.trials()[:2]) is None


def test_halving_ends_a_point_with_all_of_its_seeds(sweeps: Sweeps) -> None:
    """The best and the worst trial are of one point, whose mean is not the best one."""
    luck = {(0.1, 0): 0.0, (0.1, 1): 9.0, (0.2, 0): 1.0, (0.2, 1): 2.0, (0.3, 0): 3.0, (0.3, 1): 3}
    sweeps.score = lambda job: luck[job.optimizer.options["lr"], job.job.seed]
    sweeps.begin("optimizer.lr=0.1,0.2,0.3", pruner="halving", seeds=2)
    sweeps.resume()
    assert sweeps.states() == ["pruned", "pruned", "done", "done", "pruned", "pruned"]
    db = sweep_database.SweepDb(sweeps.directory)
    with closing(db):
        known = sweep.Sweep(sweeps.directory, db).known(db.trials())
    assert known == [
        Known({"optimizer.lr": 0.1}, 4.5, 0),
        Known({"optimizer.lr": 0.2}, 1.5, None),
        Known({"optimizer.lr": 0.3}, 3.0, 0),
    ]


def test_a_seed_that_fails_at_a_later_rung_has_no_score(sweeps: Sweeps) -> None:
    """It is tried again from that rung on, together with the other seeds of its point."""
    sweeps.score = lambda job: (
        None if job.job.seed and job.job.stop.steps == 300 else float(job.optimizer.options["lr"])
    )
    sweeps.begin("optimizer.lr=0.1,0.2,0.3,0.4", pruner="halving", seeds=2)
    sweeps.resume()
    first, *others = points.of(sweeps.trials())
    assert [trial["state"] for trial in first.trials] == ["pruned", "failed"]
    assert first.trials[1]["score"] is None
    assert first.score is None  # Not the mean of two lengths.
    assert [point.score for point in others] == [0.2, 0.3, 0.4]
    sweeps.score = lambda job: float(job.optimizer.options["lr"])
    before = len(sweeps.started)
    sweeps.resume()
    assert [job.job.stop.steps for job in sweeps.started[before:]] == [300, 300, 900, 900]
    assert points.best(sweeps.trials()) == points.of(sweeps.trials())[0]


# ---------------------------------------------------------------- the job file


def test_another_job_file_is_refused_until_it_is_restored(sweeps: Sweeps) -> None:
    def score(job: JobFile) -> float:
        if len(sweeps.started) == 2:  # It is edited during the second trial.
            sweeps.edit("batch_size = 8", "batch_size = 16")
        return float(job.optimizer.options["lr"])

    sweeps.score = score
    sweeps.begin("optimizer.lr=0.1,0.2,0.3")
    for _ in range(2):
        with pytest.raises(UsageError) as refused:
            sweeps.resume()
        assert "workers.batch_size: 8 -> 16" in refused.value.message
        assert sweeps.states() == ["done", "done", "queued"]
    sweeps.edit("batch_size = 16", "batch_size = 8")
    sweeps.resume()
    assert sweeps.states() == ["done"] * 3
    assert {job.workers.batch_size for job in sweeps.started} == {8}


def test_the_keys_that_are_varied_may_be_written_at_any_time(sweeps: Sweeps) -> None:
    sweeps.score = lambda job: None if job.optimizer.options["lr"] == 0.2 else 1.0
    sweeps.begin("optimizer.lr=0.1,0.2", trials=2)
    sweeps.resume()
    sweeps.edit("lr = 0.1", "lr = 0.05")  # As `dlctl sweep best --write` does.
    sweeps.score = lambda job: float(job.optimizer.options["lr"])
    sweeps.resume()
    assert [trial["score"] for trial in sweeps.trials()] == [1.0, 0.2]


def test_a_sweep_of_an_earlier_dlctl_goes_on_and_knows_its_job_from_then(sweeps: Sweeps) -> None:
    sweeps.begin("optimizer.lr=0.1,0.2")
    with closing(sweep_database.SweepDb(sweeps.directory)) as db:
        db._db.execute("DELETE FROM plan WHERE key = 'job'")
        db._db.commit()
        assert db.job() is None
    sweeps.resume()
    assert sweeps.states() == ["done", "done"]
    with closing(sweep_database.SweepDb(sweeps.directory)) as db:
        assert db.job() == swept_jobs.content(sweeps.file, sweep.Sweep(sweeps.directory, db).space)


# ---------------------------------------------------------------- failures


def test_a_full_disk_loses_no_point_of_a_grid(sweeps: Sweeps) -> None:
    sweeps.score = lambda job: None if job.optimizer.options["lr"] > 0.1 else 1.0
    sweeps.begin("optimizer.lr=0.1,0.2,0.3")
    sweeps.resume()
    assert sweeps.states() == ["done", "failed", "failed"]
    sweeps.score = lambda job: 0.5
    sweeps.resume()
    assert sweeps.states() == ["done"] * 3
    assert len(sweeps.started) == 5


def test_a_generation_that_fails_again_does_not_end_the_sweep(sweeps: Sweeps) -> None:
    sweeps.score = lambda job: None if job.optimizer.options["lr"] < 0.5 else 1.0
    sweeps.begin("optimizer.lr=0.1,0.2,0.3,0.4,0.5")
    with pytest.raises(DlctlError) as failed:
        sweeps.resume()
    assert f"dlctl sweep resume {sweeps.directory}" in str(failed.value.hint)
    assert sweeps.states() == ["failed"] * 4
    sweeps.resume()
    assert sweeps.states() == ["failed"] * 4 + ["done"]


def test_a_sweep_that_has_only_failed_says_so_each_time(sweeps: Sweeps) -> None:
    sweeps.score = lambda job: None
    sweeps.begin("optimizer.lr=0.1,0.2")
    for _ in range(2):
        with pytest.raises(DlctlError, match="no space"):
            sweeps.resume()


def test_training_that_diverges_is_not_tried_again(sweeps: Sweeps) -> None:
    from dlctl.util import text

    sweeps.reason = f"{text.NO_WORKER}: {text.NOT_FINITE}"
    sweeps.score = lambda job: None if job.optimizer.options["lr"] > 0.1 else 1.0
    sweeps.begin("optimizer.lr=0.1,0.2")
    sweeps.resume()
    sweeps.resume()
    assert sweeps.states() == ["done", "failed"]
    assert len(sweeps.started) == 2


# ---------------------------------------------------------------- schedules


def rates(job: JobFile) -> list[float]:
    at = schedule.factor(job, 0)
    assert at is not None
    return [at(samples) for samples in range(0, 801, 80)]


@pytest.mark.parametrize(
    ("stop", "rate"),
    [
        ("{ steps = 900 }", 'kind = "cosine"'),
        ("{ samples = 7200 }", 'kind = "linear"\nwarmup = "5%"'),
        ("{ steps = 900, samples = 9000 }", 'kind = "wsd"'),
        ("{ steps = 900 }", 'warmup = "200 steps"'),  # Longer than the first rung.
        ("{ epochs = 9 }", 'kind = "cosine"\nover = "900 steps"'),
    ],
)
def test_a_shortened_trial_has_the_rates_of_the_whole_one(
    sweeps: Sweeps, stop: str, rate: str
) -> None:
    sweeps.edit("{ steps = 900 }", stop)
    sweeps.file.write_text(f"{sweeps.file.read_text()}[schedule]\n{rate}\n")
    sweeps.begin("optimizer.lr=0.1,0.2", pruner="halving", trials=1)
    sweeps.resume()
    assert len(sweeps.started) == 3
    first, _, last = sweeps.started
    assert first.job.stop != last.job.stop
    assert rates(first) == rates(last)


def test_a_schedule_of_unknown_length_is_not_pruned(sweeps: Sweeps) -> None:
    sweeps.edit("{ steps = 900 }", "{ epochs = 9 }")
    sweeps.file.write_text(f'{sweeps.file.read_text()}[schedule]\nkind = "cosine"\n')
    with pytest.raises(UsageError) as refused:
        sweeps.begin("optimizer.lr=0.1,0.2", pruner="halving")
    assert refused.value.where == "schedule.over"
    sweeps.begin("optimizer.lr=0.1,0.2")


# ---------------------------------------------------------------- which points


def test_a_grid_tries_all_points_unless_told_otherwise(sweeps: Sweeps, notes_of: list[str]) -> None:
    words = ("optimizer.lr=0.1,0.2,0.3,0.4,0.5", "workers.batch_size=1,2,3,4,5")
    sweeps.begin(*words)
    assert sweep_database.read(sweeps.directory)[0]["trials"] == 25
    assert notes_of == []
    sweeps.begin(*words, trials=2)
    assert any("25" in text for text in notes_of)
    sweeps.resume()
    sizes = [trial["point"]["workers.batch_size"] for trial in sweeps.trials()]
    assert sizes == [1, 2]


def test_random_points_are_tried_once_each_until_there_are_no_more(
    sweeps: Sweeps, notes_of: list[str]
) -> None:
    sweeps.begin("optimizer.lr=0.1,0.2", "workers.batch_size=1..3", sampler="random")
    assert any("6 points" in text for text in notes_of)
    sweeps.resume()
    found = [points.name(trial["point"]) for trial in sweeps.trials()]
    assert len(found) == len(set(found)) == 6


def test_as_many_points_are_tried_as_were_asked_for(sweeps: Sweeps) -> None:
    sweeps.begin("optimizer.lr=0.1,0.2", "workers.batch_size=1..5", sampler="random", trials=9)
    sweeps.resume()
    found = [points.name(trial["point"]) for trial in sweeps.trials()]
    assert len(found) == len(set(found)) == 9
