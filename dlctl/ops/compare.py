"""Compare methods on one job: each is tuned with the same budget, and then runs with every seed.

A comparison is a directory beside the job's runs, with a run directory for each trial and
`comparison.json`: all that is needed to do it again.
"""

from __future__ import annotations

import json
import platform
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlctl import __version__
from dlctl.errors import DlctlError, UsageError
from dlctl.observe import history, plot
from dlctl.ops import plain_runs, real_runs, run_figures, simulate, simulators
from dlctl.ops.cases import Start
from dlctl.ops.simulators import Simulators
from dlctl.records.best import Target
from dlctl.runs import paths
from dlctl.sim.request import LinkSpeed, SimulationRequest
from dlctl.study import table, tuning, variants
from dlctl.study.judging import Score, score
from dlctl.study.tuning import PatternSearch
from dlctl.util import cores, notes, regular

if TYPE_CHECKING:
    from dlctl.job.config import JobFile

Json = dict[str, Any]
FILE = "comparison.json"
FILE_MODE = 0o644
SCHEMA = "dlctl.comparison/1"
NAME_CHARS_MAX = 64
WHY_CHARS_MAX = 200
TUNING_SEED = 0
"""No final run has it: rates that were chosen on a seed do well on that seed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides a comparison."""

    file: Path
    methods: tuple[str, ...]
    target: str
    changes: Mapping[str, Any]
    """Keys of the job file with other values, for all methods."""
    seeds: int
    trials: int
    """Of tuning, for each method; 1: its values as they are."""
    request: SimulationRequest
    is_real: bool = False
    """The final runs are on real daemons."""
    samples: int | None = None
    """Of a data epoch; 0: a stream. None: not known yet."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    method: str
    seed: int
    values: Json
    """Of the tuned keys."""


class Comparison:
    """One comparison in progress."""

    def __init__(self, plan: Plan, stop: Json, directory: Path) -> None:
        """stop: `stop_of` the plan."""
        self.plan = plan
        self.target = Target.parse(plan.target)
        self.directory = directory
        self.trials: list[Json] = []
        self.failures: list[Json] = []
        """Of the final runs: method, seed, reason."""
        self.has_results = False
        """Whether a trial has run to its end."""
        self._process: Simulators
        self._stop = stop
        self._document = document_of(plan.file)
        self._request = plan.request

    def run(self, process: Simulators) -> Json:
        """All of it; returns what `comparison.json` has. Raises DlctlError."""
        self._process = process
        samples = self._measure()
        searches = {name: self._search(name, samples) for name in self.plan.methods}
        while generation := [
            (name, point) for name, search in searches.items() for point in search.ask()
        ]:
            trials = [
                ComparedRun(name, TUNING_SEED, searches[name].values(point))
                for name, point in generation
            ]
            scores: dict[str, dict[tuple[int, ...], Score]] = {}
            for (name, point), outcome in zip(generation, self._outcomes(trials), strict=True):
                scores.setdefault(name, {})[point] = score(outcome, self.target)
            for name, found in scores.items():
                searches[name].tell(found)
            notes.note(f"tuning: {len(self.trials)} trials done")
        seeds = range(TUNING_SEED + 1, TUNING_SEED + 1 + self.plan.seeds)
        best = {name: search.values(search.best) for name, search in searches.items()}
        final = [
            ComparedRun(name, seed, best[name]) for name in self.plan.methods for seed in seeds
        ]
        outcomes = self._real(final) if self.plan.is_real else self._outcomes(final)
        runs: dict[str, list[Json | None]] = {name: [] for name in self.plan.methods}
        for trial, outcome in zip(final, outcomes, strict=True):
            runs[trial.method].append(outcome)
        return self._record(best, runs)

    def _measure(self) -> int:
        """Measure a step, unless it is given. Returns the samples of a data epoch; 0: a stream."""
        if self.plan.samples is not None and self._request.step_s is not None:
            return self.plan.samples
        start = self._measured_job()
        directory = self.directory / "measured"
        simulate.prepare(directory, start)
        request = replace(self._request, directory=str(directory), step_s=None)
        (answer,) = self._process.ask([request])
        if (error := simulators.error_in(answer)) is not None:
            raise error
        given = {} if self._request.step_s is None else {"step_s": self._request.step_s}
        self._request = replace(self._request, **{**answer["measured"], **given})
        self.plan = replace(self.plan, samples=int(answer["samples"]))
        return int(answer["samples"])

    def _measured_job(self) -> Start:
        """The job's own method and workers, whichever are compared: a worker's share of the cores
        is the same in all rows then. Raises UsageError.
        """
        for name in (variants.own_method(self._document), variants.DDP):
            with suppress(UsageError):  # It cannot be simulated: that of others takes as long.
                return self._start(ComparedRun(name, TUNING_SEED, {}))
        return self._start(ComparedRun(self.plan.methods[0], TUNING_SEED, {}))

    def _search(self, name: str, samples: int) -> PatternSearch:
        job = self._start(ComparedRun(name, TUNING_SEED, {})).job
        keys = tuning.keys_of(job, _steps_of(job, samples))
        return PatternSearch(keys if self.plan.trials > 1 else (), max(1, self.plan.trials))

    def _start(self, trial: ComparedRun, run_dir: Path | None = None) -> Start:
        """The job of a trial. Raises UsageError, naming the method."""
        changes = {
            **variants.overrides(self._document, trial.method),
            **self.plan.changes,
            **trial.values,
            "job.seed": trial.seed,
            **self._stop,
        }
        if run_dir is not None:  # A name of its own: it is not the newest run of the user's job.
            words = f"{run_dir.name}-{trial.method}".replace(variants.WITH, "-")
            name = words[-NAME_CHARS_MAX:].lstrip("-._")
            changes |= {"job.run_dir": str(run_dir), "job.name": name}
        try:
            start = simulate.read(self.plan.file, changes)
            simulate.check(start.job, self._conditions(trial.method))
        except UsageError as error:
            error.message = f"{trial.method}: {error.message}"
            raise
        return start

    def _conditions(self, method: str) -> SimulationRequest:
        """What the runs of a method have in common."""
        if method == variants.ALONE:  # It has no slower worker.
            return replace(self._request, slow={}, is_plain=True)
        return replace(self._request, is_plain=method in variants.PLAIN)

    def _outcomes(self, trials: Sequence[ComparedRun]) -> list[Json | None]:
        """The figures of each run; None: it has failed. Raises DlctlError if all so far have."""
        directories = [
            self.directory / f"{trial.method}-{number}"
            for number, trial in enumerate(trials, len(self.trials))
        ]
        errors = list(map(self._prepare, trials, directories))
        requests = [
            replace(self._conditions(trial.method), directory=str(directory), seed=trial.seed)
            for trial, directory, error in zip(trials, directories, errors, strict=True)
            if error is None
        ]
        answers = {answer["directory"]: answer for answer in self._process.ask(requests)}
        found: list[Json | None] = []
        for n, (trial, directory) in enumerate(zip(trials, directories, strict=True)):
            if (answer := answers.get(str(directory))) is not None:
                errors[n] = simulators.error_in(answer)
                (directory / paths.UNFINISHED).unlink(missing_ok=True)
            found.append(run_figures.of_run(directory) if errors[n] is None else None)
            self._note_failure(trial, found[-1], errors[n])
        self.has_results |= not all(errors)
        if not self.has_results:
            raise next(filter(None, errors))
        return found

    def _prepare(self, trial: ComparedRun, directory: Path) -> DlctlError | None:
        """Make its run directory. Returns the error if its tuned values are not valid: others are.
        Raises UsageError for a job that is not, whatever the values.
        """
        self.trials.append({**asdict(trial), "directory": directory.name})
        try:
            simulate.prepare(directory, self._start(trial))
        except UsageError as error:
            if not trial.values:
                raise
            return error
        return None

    def _note_failure(
        self, trial: ComparedRun, figures: Json | None, error: DlctlError | None
    ) -> None:
        if error is None and (figures is None or figures["state"] != "failed"):
            return
        reason = str(figures["reason"]) if figures is not None else _in_a_line(error)
        if trial.seed != TUNING_SEED:  # Values that are tried may fail.
            self.failures.append({"method": trial.method, "seed": trial.seed, "reason": reason})

    def _real(self, trials: Sequence[ComparedRun]) -> list[Json | None]:
        """The same on real daemons, one run after the other. Raises DlctlError if all have failed
        to start.
        """
        found: list[Json | None] = []
        errors: list[DlctlError | None] = []
        for trial in trials:
            figures, error = None, None
            try:
                figures = run_figures.of_run(self._real_run(trial))
            except DlctlError as caught:
                error = caught
            self._note_failure(trial, figures, error)
            found.append(figures)
            errors.append(error)
        if all(errors):
            raise next(filter(None, errors))
        return found

    def _real_run(self, trial: ComparedRun) -> Path:
        """Returns its run directory. Raises DlctlError."""
        name = f"{trial.method} with seed {trial.seed}"
        start = self._start(trial, run_dir=self.directory)
        if trial.method in variants.PLAIN:
            directory = self.directory / f"{trial.method}-real-{trial.seed}"
            plain_runs.run(start, directory, name)
        else:
            directory = real_runs.run(start, name)
        self.trials.append({**asdict(trial), "directory": directory.name})
        return directory

    def _record(self, best: Mapping[str, Json], runs: Mapping[str, list[Json | None]]) -> Json:
        plan, content = self.plan, regular.read_bytes(self.plan.file).decode()
        record: Json = {
            "schema": SCHEMA,
            "plan": {
                **asdict(plan),
                "file": str(plan.file.resolve()),
                "request": self._request.to_json(),
            },
            "job": content,
            "tuned": dict(best),
            "runs": dict(runs),
            "trials": self.trials,
            "failures": self.failures,
            "made_with": made_with(),
        }
        data = json.dumps(record, indent=1).encode()
        paths.write(self.directory / FILE, data, FILE_MODE)
        return record


def _steps_of(job: JobFile, samples: int) -> float | None:
    """Steps of each worker in the whole run, where the job file implies that."""
    stop, size = job.job.stop, job.workers.batch_size
    found = [] if stop.steps is None else [float(stop.steps)]
    if isinstance(size, int):
        totals = (stop.samples, None if stop.epochs is None else stop.epochs * samples)
        found += [total / (size * job.gradient.accumulate) for total in totals if total]
    return min(found) / job.workers.count if found else None


def _in_a_line(error: DlctlError | None) -> str:
    if error is None:
        return ""
    from dlctl.jobfile import JobFileError

    if isinstance(error, JobFileError):
        return "; ".join(f"{each.key}: {each.message}" for each in error.problems)
    return error.message


def made_with() -> Json:
    """What bit-identical repetition depends on."""
    return {
        "dlctl": __version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "cores": cores.usable(),
    }


def document_of(file: Path) -> Json:
    """The job file as it is written. Raises UsageError."""
    from dlctl.jobfile import reading

    return reading.parse(file, reading.read(file))


def request(
    link: str | None, slow: Mapping[str, float], step_s: float | None, count: int | None
) -> SimulationRequest:
    """What all simulations of a comparison have in common. count: cores of a machine; None: as many
    as here, on record for a repetition. Raises UsageError.
    """
    speed = None if link is None else LinkSpeed.parse(link)
    return SimulationRequest(
        directory="", link=speed, slow=slow, step_s=step_s, cores=count or cores.usable()
    )


def compare(plan: Plan, slots: int) -> tuple[Path, Json]:
    """Returns the directory of the comparison and its record. Raises UsageError for an invalid job,
    method or target.
    """
    if plan.is_real and (plan.request.link is not None or plan.request.slow):
        raise UsageError(
            "--link and --slow are simulated, and --real runs on this machine as it is",
            hint="remove --real, or --link and --slow",
        )
    stop, document = stop_of(plan), document_of(plan.file)
    for name in plan.methods:  # All at once, before anything runs.
        simulate.read(plan.file, {**variants.overrides(document, name), **plan.changes})
    job = simulate.read(plan.file, plan.changes).job.job
    plan = replace(plan, target=stop["job.stop.target"])
    parent = (plan.file.parent / job.run_dir).resolve()
    directory = parent / f"{job.name}-compare-{secrets.token_hex(2)}"
    directory.mkdir(mode=paths.PRIVATE, parents=True)
    comparison = Comparison(plan, stop, directory)
    try:
        with simulators.opened(slots, plan.file) as process:
            return directory, comparison.run(process)
    except BaseException:
        if comparison.has_results:
            notes.warn(f"the trials that have ended are in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
        raise


def stop_of(plan: Plan) -> Json:
    """The keys of when a run of the plan ends: the target, beside the limits of the job file with
    its defaults, which a table with a target alone would not have. Raises UsageError.
    """
    stop = simulate.read(plan.file, plan.changes).job.job.stop
    target = _target(plan.target or stop.target or "")
    if not stop.limits:
        raise UsageError(
            "the job ends at its target alone, which some trials may never reach",
            where=f"{plan.file}: job.stop",
            hint="add epochs, steps, samples or seconds there, or --set job.stop.epochs=20",
        )
    return {
        "job.stop.target": target,
        **{f"job.stop.{key}": value for key, value in stop.limits.items()},
    }


def _target(text: str) -> str:
    try:
        return str(Target.parse(text))
    except ValueError as error:
        what = f"--target: {error}" if text else "there is no target to compare by"
        hint = "--target 'accuracy >= 0.95', a metric of the task's evaluate"
        raise UsageError(what, hint=hint) from None


def read(file: Path) -> Json:
    """A `comparison.json`. Raises UsageError."""
    try:
        record: Json = json.loads(regular.read_bytes(file))
        if record["schema"] != SCHEMA:
            raise ValueError(f"its schema is {record['schema']}, this dlctl reads {SCHEMA}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "dlctl compare writes it into the directory that it prints"
        raise UsageError(
            f"cannot read the comparison: {error}", where=str(file), hint=hint
        ) from None
    try:  # What is read of it later, after hours.
        _plan_in(record)
        record["job"].encode()
        table.rows(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        hint = f"make it again with this dlctl, {__version__}"
        why = " ".join(f"{type(error).__name__}: {error}".split())[:WHY_CHARS_MAX]
        what = f"it is no comparison of this version of dlctl: {why}"
        raise UsageError(what, where=str(file), hint=hint) from None
    return record


def plan_of(record: Mapping[str, Any]) -> Plan:
    """The plan of a comparison that was made (`read`). Raises UsageError if its job file is another
    now.
    """
    plan = _plan_in(record)
    try:
        is_same = regular.read_bytes(plan.file) == record["job"].encode()
    except OSError as error:
        what = f"cannot read the job file of the comparison: {error.strerror}"
    else:
        if is_same:
            return plan
        what = "the job file is not that of the comparison"
    hint = f'restore it: the text is under "job" in {FILE}'
    raise UsageError(what, where=str(plan.file), hint=hint)


def _plan_in(record: Mapping[str, Any]) -> Plan:
    """Raises KeyError, TypeError, ValueError or AttributeError if it has none."""
    from pydantic import TypeAdapter

    values = {**record["plan"], "file": Path(record["plan"]["file"])}
    request = SimulationRequest.of_json(values["request"])
    plan = Plan(**{**values, "methods": tuple(values["methods"]), "request": request})
    return TypeAdapter(Plan).validate_python(asdict(plan))


def differs(record: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether two comparisons have other results."""
    return table.rows(record) != table.rows(before)


def draw(directory: Path, record: Mapping[str, Any], by: str, file: Path) -> None:
    """The target's metric of each method's first final run. Raises DlctlError or UsageError."""
    metric = Target.parse(record["plan"]["target"]).metric
    seed = TUNING_SEED + 1
    chosen = {
        t["method"]: directory / t["directory"] for t in record["trials"] if t["seed"] == seed
    }
    ran = [path for path in chosen.values() if path.is_dir()]  # Others had no valid values.
    found = [history.read(path, whole=False) for path in ran]
    plot.draw(found, f"evaluation.{metric}", by, file, log=False)
