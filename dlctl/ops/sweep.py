"""Hyperparameter sweeps: each trial is a run of its own, and is taken up from its checkpoint after
a kill of anything. What is to be done next follows from `sweep.db` alone.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError, NotFound, UsageError
from dlctl.ops import real_runs, run_figures, simulate, swept_jobs
from dlctl.ops.cases import Start
from dlctl.records.best import Best
from dlctl.runs import paths
from dlctl.runs.sweep_database import ENDED, FILE, SweepDb
from dlctl.study import points, samplers, space
from dlctl.study.judging import best_value
from dlctl.study.points import TriedPoint
from dlctl.study.samplers import Known, Sampler
from dlctl.util import hints, notes
from dlctl.util.text import is_poisoned, plural

Json = dict[str, Any]
NAME_CHARS_MAX = 64
TRIALS = 20
KEPT = 1 / 3
"""Of a generation, the part that goes on from one rung to the next one."""
RUNGS = {"none": (1.0,), "halving": (1 / 9, 1 / 3, 1.0)}
"""Pruner -> the shares of the job's length at which it looks at the trials of a generation
(successive halving: Jamieson and Talwalkar, 2016). A generation is judged as a whole, so that the
outcome does not depend on how many trials run at a time."""


@dataclass(frozen=True, slots=True)
class SweepPlan:
    file: str
    words: tuple[str, ...]
    """What --set says."""
    trials: int
    """Points, each with all seeds. Of `begin`, 0: all of a grid, else `TRIALS`."""
    metric: str
    """As `checkpoints.best`: "accuracy max"."""
    sampler: str
    pruner: str
    seeds: int
    """Of each point; its score is their mean."""
    seed: int
    """Of the sampler, and the first one of the trials."""
    generation: int = 4
    """Points that are asked for together."""


class Sweep:
    def __init__(self, directory: Path, db: SweepDb) -> None:
        self.directory = directory
        self.db = db
        values = db.plan()
        self.plan = SweepPlan(**{**values, "words": tuple(values["words"])})
        self.space = space.parse(self.plan.words)
        self.best = _metric(self.plan.metric)
        self._sampler: Sampler = samplers.SAMPLERS[self.plan.sampler](self.space, self.plan.seed)
        self._stopped = threading.Event()
        self._again: set[int] = set()
        """Generations of failed trials that this command tries again."""

    def take_up(self) -> None:
        """Before the first trial of a command: trials that ran are preempted, and those that have
        failed are tried once more, as the disk may no longer be full. Raises UsageError if the job
        file has changed.
        """
        trials = self.db.trials()
        again = [trial for point in points.of(trials) for trial in _again(point)]
        if again or any(trial["state"] not in ENDED for trial in trials):
            self._check_file()
        failed = sum(trial["state"] == "failed" for trial in again)
        if failed:
            notes.note(f"{plural(failed, 'failed trial')} will be tried again")
        for trial in [trial for trial in trials if trial["state"] == "running"] + again:
            state = "preempted" if trial["run"] else "queued"
            self.db.set(trial["number"], state=state, reason="")
        self._again = {trial["generation"] for trial in again}

    def run(self, slots: int) -> None:
        """To the end. Raises DlctlError if every point of a generation, or of the sweep, has
        failed, and UsageError if the job file has changed.
        """
        with ThreadPoolExecutor(slots) as threads:
            try:
                while self._next_generation():
                    self._work_off(threads)
            except BaseException:
                self._stopped.set()
                raise
        self._check_not_all_failed(points.of(self.db.trials()))

    # ------------------------------------------------------------ generations

    def _next_generation(self) -> bool:
        """Whether there are trials to run; asks for new ones when all earlier ones have ended."""
        trials = self.db.trials()
        if any(trial["state"] not in ENDED for trial in trials):
            return True
        known = self.known(trials)
        left = self.plan.trials - len(known)
        if left <= 0:
            return False
        self._check_file()
        generation = 1 + max((trial["generation"] for trial in trials), default=-1)
        size = min(self.plan.generation, left)
        found = samplers.untried(self._sampler, generation, size, known)
        if not found:
            notes.note(
                f"all {len(known)} points of these values were tried; {left} less than asked"
            )
        seeds = range(self.plan.seed, self.plan.seed + self.plan.seeds)
        self.db.add(generation, [(point, seed) for point in found for seed in seeds])
        return bool(found)

    def known(self, trials: Sequence[Json]) -> list[Known]:
        """Every point that was asked for, in that order."""
        found = points.of(trials)
        return [Known(point.values, point.score, point.pruned_at) for point in found]

    def _work_off(self, threads: ThreadPoolExecutor) -> None:
        """Run the open trials, generation by generation and rung by rung. Of an earlier generation
        there are only trials that had failed: those that make it to a rung are judged by
        themselves there.
        """
        last = len(RUNGS[self.plan.pruner]) - 1
        for generation in sorted({trial["generation"] for trial in self._open()}):
            for rung, share in enumerate(RUNGS[self.plan.pruner]):
                mine = [trial for trial in self._open(generation) if trial["rung"] == rung]
                ended = [threads.submit(self._run, trial, share, rung == last) for trial in mine]
                for one in ended:
                    one.result()
                if mine and rung != last:
                    self._prune(generation, rung)
            if generation not in self._again:
                found = points.of(self.db.trials())
                self._check_not_all_failed([p for p in found if p.generation == generation])

    def _open(self, generation: int | None = None) -> list[Json]:
        found = [trial for trial in self.db.trials() if trial["state"] not in ENDED]
        return [trial for trial in found if generation in (None, trial["generation"])]

    def _prune(self, generation: int, rung: int) -> None:
        """End the worst points of those that have made it here, with all of their seeds."""
        mine = {trial["number"] for trial in self._open(generation) if trial["rung"] == rung}

        def numbers(some: Sequence[TriedPoint]) -> list[int]:
            return [t["number"] for point in some for t in point.trials if t["number"] in mine]

        here = [point for point in points.of(self.db.trials()) if numbers([point])]
        for number in numbers([point for point in here if point.mean is None]):
            self.db.set(number, state="pruned", reason="another seed has failed")
        scored = [
            (point.mean, numbers([point])[0], point) for point in here if point.mean is not None
        ]
        ranked = [point for _, _, point in sorted(scored, key=lambda each: each[:2])]
        kept = max(1, round(len(ranked) * KEPT))
        self.db.prune(numbers(ranked[kept:]), numbers(ranked[:kept]), rung)

    def _check_not_all_failed(self, found: Sequence[TriedPoint]) -> None:
        if not found or not all(point.has_failed for point in found):
            return
        first = next(trial for trial in found[0].trials if trial["state"] == "failed")
        logs = f"dlctl logs -j {first['run']}" if first["run"] else ""
        again = hints.command(f"dlctl sweep resume {self.directory}", "tries them again")
        raise DlctlError(
            f"all points that were tried together have failed: {first['reason']}",
            where=str(self.directory),
            hint=hints.either(logs, again),
        )

    def _check_file(self) -> None:
        """Raises UsageError if the job file is not that which the sweep has begun with."""
        file, before = Path(self.plan.file), self.db.job()
        if before is None:  # An earlier dlctl has begun it: from now on.
            self.db.put_job(swept_jobs.content(file, self.space))
            return
        swept_jobs.check_same(file, self.space, before, self.directory)

    # ------------------------------------------------------------ one trial

    def _run(self, trial: Json, share: float, is_last: bool) -> None:
        number = trial["number"]
        if self._stopped.is_set():
            return  # It stays as it is, for the next command.
        self._check_file()  # It may be edited while trials run.
        try:
            start = self._start(trial, share)
            self.db.set(number, state="running", run=start.job.job.name)
            directory = real_runs.run_on(start, f"trial {number}", self._stopped)
            figures = run_figures.of_run(directory)
            self.db.set(number, run=directory.name)
            if self._stopped.is_set() and figures["state"] not in ("finished", "failed"):
                self.db.set(number, state="preempted")
                return
            self._take(number, figures, is_last)
        except DlctlError as error:
            self._failed(number, error.message)

    def _failed(self, number: int, reason: str) -> None:
        """Without the score of a shorter training."""
        self.db.set(number, state="failed", score=None, reason=reason)

    def _take(self, number: int, figures: Json, is_last: bool) -> None:
        more = self.best.end == "max"
        value = best_value(figures, self.best.metric, is_more_better=more)
        if figures["state"] != "finished" or value is None:
            missing = f"no evaluation has {self.best.metric}"
            reason = figures["reason"] if figures["state"] != "finished" else missing
            self._failed(number, str(reason))
            return
        state = "done" if is_last else "running"
        self.db.set(number, state=state, score=-value if more else value, reason="")

    def _start(self, trial: Json, share: float) -> Start:
        name = f"{self.directory.name}-t{trial['number']:03d}"
        changes = {
            **trial["point"],
            "job.seed": trial["seed"],
            "job.run_dir": str(self.directory),
            "job.name": name[-NAME_CHARS_MAX:].lstrip("-._"),
        }
        return swept_jobs.read(Path(self.plan.file), changes, share)


def _again(point: TriedPoint) -> list[Json]:
    """The trials to be tried again of a point that has failed, with the seeds that were ended
    because of it. That training diverges is a result, and stays.
    """
    failed = [trial for trial in point.trials if trial["state"] == "failed"]
    if not failed or any(is_poisoned(trial["reason"]) for trial in failed):
        return []
    return [trial for trial in point.trials if trial["state"] in ("failed", "pruned")]


def _metric(text: str) -> Best:
    try:
        found = Best.parse(text)
    except ValueError as error:
        raise UsageError(f"--metric: {error}") from None
    if found is None:
        raise UsageError(
            "a sweep needs the metric that is to become best",
            hint='--metric "accuracy max", or best in [checkpoints]',
        )
    return found


# ---------------------------------------------------------------- commands


def begin(plan: SweepPlan) -> Path:
    """Make the directory of a sweep. Raises UsageError for a wrong job, key, value or metric."""
    file, found = Path(plan.file), space.parse(plan.words)
    if not found:
        raise UsageError("nothing is varied", hint=space.HINT)
    samplers.SAMPLERS[plan.sampler](found, plan.seed)
    for changes in swept_jobs.samples(found):
        job = simulate.read(file, changes).job  # A wrong key or type is told now.
        swept_jobs.check(job, plan.pruner)
    metric = str(_metric(plan.metric or job.checkpoints.best))
    trials = _trials(plan, found)
    parent = (file.parent / job.job.run_dir).resolve()
    directory = parent / f"{job.job.name}-sweep-{secrets.token_hex(2)}"
    directory.mkdir(mode=paths.PRIVATE, parents=True)
    with closing(SweepDb(directory, create=True)) as db:
        values = {"metric": metric, "file": str(file.resolve()), "trials": trials}
        db.put_job(swept_jobs.content(file.resolve(), found))
        db.put_plan({**asdict(plan), **values})
    return directory


def _trials(plan: SweepPlan, axes: Mapping[str, space.Axis]) -> int:
    """How many points are tried: no more than there are, and all of a grid unless that is asked."""
    total = space.count(axes)
    asked = plan.trials or (total if plan.sampler == "grid" else TRIALS)
    if asked > total:
        notes.note(f"these values make {total:.0f} points: each is tried once")
    elif plan.sampler == "grid" and asked < total:
        notes.warn(f"--trials {asked:.0f}: the grid has {total:.0f} points; its last are left out")
    return int(min(asked, total))


def resume(directory: Path, slots: int, show: Callable[[str], None] = notes.note) -> None:
    """Run a sweep until its end, or from where it was killed. Raises DlctlError if another process
    runs it.
    """
    with closing(SweepDb(directory)) as db, _alone(directory):
        sweep = Sweep(directory, db)
        sweep.take_up()
        done = sum(trial["state"] in ENDED for trial in db.trials())
        show(f"{directory.name}: {done} trials have ended")
        sweep.run(slots)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    try:
        with paths.held(directory):
            yield
    except BlockingIOError:
        raise DlctlError("another command runs this sweep", where=str(directory)) from None


def newest() -> list[Path]:
    """The directories of the sweeps in ./runs, the oldest first."""
    found = [path.parent for path in Path("runs").glob(f"*/{FILE}")]
    return sorted(found, key=lambda path: path.stat().st_mtime)


def named(name: str | None) -> Path:
    """A sweep by its directory or name; without one the newest. Raises NotFound."""
    if name is not None:
        for path in (Path(name), Path("runs") / name):
            if (path / FILE).is_file():
                return path.resolve()
        raise NotFound(f'there is no sweep "{name}"', hint="dlctl sweep ls")
    with suppress(IndexError):
        return newest()[-1].resolve()
    raise NotFound("there is no sweep in ./runs", hint="dlctl sweep job.toml --set KEY=VALUES")
