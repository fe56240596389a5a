"""Run the claims of papers: experiments on simulated runs, and what became of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dlctl.errors import UsageError
from dlctl.ops import compare, examples, other_process, run_figures, simulate, simulators
from dlctl.ops.cases import Start
from dlctl.ops.simulators import Simulators
from dlctl.records.best import Target
from dlctl.runs import checkpoints
from dlctl.runs.database import RunDb
from dlctl.sim.request import SimulationRequest
from dlctl.study import claims, tuning, variants
from dlctl.study.claims.base import SEEDS_MIN, Arm, PaperClaim, Ran, judged, outcome
from dlctl.study.judging import Score, score
from dlctl.study.tuning import PatternSearch
from dlctl.util import notes, regular

Json = dict[str, Any]
SCHEMA = "dlctl.claim/1"
LOOPS = "daemons.simulator.loops"
JOB = "job.toml"


@dataclass(frozen=True, slots=True)
class _Trial:
    arm: Arm
    seed: int


class SimulatedLab:
    """A directory with a job in which claims run (`study.claims.base.Lab`)."""

    def __init__(self, process: Simulators, directory: Path, seeds: Sequence[int]) -> None:
        self.seeds = seeds
        self.runs = 0
        self._process = process
        self._directory = directory

    def place(self, example: str, job: str = "", files: Mapping[str, str] | None = None) -> None:
        folder = examples.folders()[example]
        ignored = shutil.ignore_patterns("runs", "__pycache__")
        shutil.copytree(folder, self._directory, ignore=ignored, dirs_exist_ok=True)
        for name, text in {**(files or {}), JOB: job}.items():
            (self._directory / name).write_text(text)

    def tuned(self, arms: Mapping[str, Arm], target: str, trials: int) -> dict[str, Arm]:
        goal = Target.parse(target)
        searches = {name: self._search(arm, trials) for name, arm in arms.items()}
        while asked := [(name, point) for name, each in searches.items() for point in each.ask()]:
            tried = [
                _Trial(arms[name].having(searches[name].values(point)), compare.TUNING_SEED)
                for name, point in asked
            ]
            scores: dict[str, dict[tuple[int, ...], Score]] = {}
            for (name, point), ran in zip(asked, self._ran(tried), strict=True):
                found = score(None if ran is None else ran.figures, goal)
                scores.setdefault(name, {})[point] = found
            for name, of_name in scores.items():
                searches[name].tell(of_name)
        best = {name: search.values(search.best) for name, search in searches.items()}
        return {name: arm.having(best[name]) for name, arm in arms.items()}

    def _search(self, arm: Arm, trials: int) -> PatternSearch:
        job = self._start(_Trial(arm, compare.TUNING_SEED)).job
        rates = [key for key in tuning.keys_of(job, None) if key.name.endswith(".lr")]
        return PatternSearch(rates, trials)

    def run(self, arms: Mapping[str, Arm]) -> dict[str, list[Ran | None]]:
        trials = [_Trial(arm, seed) for arm in arms.values() for seed in self.seeds]
        ran, count = self._ran(trials), len(self.seeds)
        return {name: ran[n * count : (n + 1) * count] for n, name in enumerate(arms)}

    def loop(self, name: str, request: Json) -> Json:
        argv = [sys.executable, "-P", "-m", LOOPS, name]
        asked = json.dumps({**request, "directory": str(self._directory)})
        done = subprocess.run(argv, input=asked, capture_output=True, text=True, check=False)
        if done.returncode:
            what = f"the loop {name} has failed"
            raise other_process.error_of(done.stderr, done.returncode, self._directory, what)
        answer: Json = json.loads(done.stdout)
        return answer

    def _start(self, trial: _Trial) -> Start:
        file = self._directory / JOB
        document = compare.document_of(file)
        arm = trial.arm
        changes = {**variants.overrides(document, arm.method), **arm.changes}
        return simulate.read(file, {**changes, "job.seed": trial.seed})

    def _ran(self, trials: Sequence[_Trial]) -> list[Ran | None]:
        """None: that run has failed, as one does that diverges. Raises DlctlError if the code of
        all runs has failed.
        """
        requests = []
        for trial in trials:
            start = self._start(trial)
            request = SimulationRequest(directory="", seed=trial.seed, **trial.arm.conditions)
            simulate.check(start.job, request)
            directory = self._directory / "runs" / f"run-{self.runs}"
            self.runs += 1
            simulate.prepare(directory, start)
            requests.append(replace(request, directory=str(directory)))
        answers = self._process.ask(requests)
        errors = [simulators.error_in(answer) for answer in answers]
        if all(errors) and errors[0] is not None:
            raise errors[0]
        for error in errors:
            if error is not None:
                notes.warn(f"a run has failed: {error.message}")
        found = [
            None if error is not None else _read(Path(request.directory), answer["simulated"])
            for request, answer, error in zip(requests, answers, errors, strict=True)
        ]
        for request in requests:
            shutil.rmtree(request.directory)
        notes.note(f"{self.runs} runs done")
        return found


def _read(directory: Path, how: Json) -> Ran | None:
    """None: the run has failed, as one does that diverges."""
    figures = run_figures.of_run(directory)
    if figures["state"] == "failed":
        notes.warn(f"a run has failed: {figures['reason']}")
        return None
    with closing(RunDb(directory, readonly=True)) as db:
        figures["links"] = db.run().get("links") or {}
    weights = None
    if complete := checkpoints.complete(directory):
        newest = max(complete, key=checkpoints.number)
        manifest = complete[newest]
        weights = checkpoints.read_slice(newest, manifest, checkpoints.W, 0, manifest["size"])
    return Ran(figures, weights, how)


@contextmanager
def lab(seeds: int, slots: int) -> Iterator[SimulatedLab]:
    """In a directory that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="dlctl-claim-") as name:
        directory = Path(name)
        with simulators.opened(slots, directory) as process:
            first = compare.TUNING_SEED + 1
            yield SimulatedLab(process, directory, range(first, first + seeds))


def run(name: str, slots: int, seeds: int | None = None) -> Json:
    """Run a claim; returns its record. seeds: in place of the claim's own number. Raises NotFound,
    or DlctlError for what fails.
    """
    claim = claims.load(name)
    count = seeds or claim.seeds
    if count < SEEDS_MIN:
        raise UsageError(f"a claim is judged over at least {SEEDS_MIN} seeds")
    began, began_cpu = time.monotonic(), _cpu_s()
    with lab(count, slots) as place:
        found = claim.experiment(place)
    return {
        **described(name, claim),
        "outcome": outcome(found.margins),
        "parts": {part: judged(row) for part, row in found.margins.items()},
        "margins": {part: [*row] for part, row in found.margins.items()},
        "figures": {what: dict(arms) for what, arms in found.figures.items()},
        "notes": [*found.notes],
        "seeds": count,
        "simulated_runs": place.runs,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_s": round(_cpu_s() - began_cpu, 1),
        "made_at": datetime.now(UTC).strftime("%Y-%m-%d"),
        "made_with": compare.made_with(),
    }


def _cpu_s() -> float:
    """Of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def described(name: str, claim: PaperClaim) -> Json:
    """What the claim is, as data."""
    fields = ("paper", "sentence", "setup", "measure", "minutes")
    return {
        "schema": SCHEMA,
        "name": name,
        **{field: getattr(claim, field) for field in fields},
        "criterion": dict(claim.criterion),
        "figure": claim.figure,
    }


def read(file: Path) -> Json:
    """The record of a claim. Raises UsageError."""
    try:
        record: Json = json.loads(regular.read_bytes(file))
        if record["schema"] != SCHEMA:
            raise ValueError(f"its schema is {record['schema']}, this dlctl reads {SCHEMA}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"cannot read the record of a claim: {error}", where=str(file)) from None
    return record
