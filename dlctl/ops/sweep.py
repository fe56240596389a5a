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
from dlctl.ops import real_runs, run_figures, simulate
from dlctl.ops.cases import Start
from dlctl.records.best import Best
from dlctl.runs import paths
from dlctl.runs.sweep_database import ENDED, FILE, SweepDb
from dlctl.study import space
from dlctl.study.judging import best_value
from dlctl.study.samplers import SAMPLERS, Known, Sampler
from dlctl.util import notes

Json = dict[str, Any]
NAME_CHARS_MAX = 64
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
        self._sampler: Sampler = SAMPLERS[self.plan.sampler](self.space, self.plan.seed)
        self._stopped = threading.Event()

    def run(self, slots: int) -> None:
        """To the end. Raises DlctlError if every trial of a generation has failed."""
        with ThreadPoolExecutor(slots) as threads:
            try:
                while self._next_generation():
                    self._work_off(threads)
            except BaseException:
                self._stopped.set()
                raise

    # ------------------------------------------------------------ generations

    def _next_generation(self) -> bool:
        """Whether there are trials to run; asks for new ones when all earlier ones have ended."""
        trials = self.db.trials()
        if any(trial["state"] not in ENDED for trial in trials):
            return True
        known = self.known(trials)
        left = self.plan.trials - len(known)
        generation = 1 + max((trial["generation"] for trial in trials), default=-1)
        points = self._sampler.ask(generation, min(self.plan.generation, left), known)
        seeds = range(self.plan.seed, self.plan.seed + self.plan.seeds)
        self.db.add(generation, [(point, seed) for point in points[:left] for seed in seeds])
        return bool(points and left > 0)

    def known(self, trials: Sequence[Json]) -> list[Known]:
        """Every point that has ended, in the order in which they were asked for."""
        points: dict[tuple[int, str], list[Json]] = {}
        for trial in trials:
            points.setdefault((trial["generation"], str(trial["point"])), []).append(trial)
        found = []
        for of_point in points.values():
            scores = [trial["score"] for trial in of_point]
            mean = None if None in scores else sum(scores) / len(scores)
            found.append(Known(of_point[0]["point"], mean))
        return found

    def _work_off(self, threads: ThreadPoolExecutor) -> None:
        """Run the open trials, rung by rung."""
        for rung, share in enumerate(RUNGS[self.plan.pruner]):
            mine = [trial for trial in self.db.trials() if trial["state"] not in ENDED]
            if mine and min(trial["rung"] for trial in mine) > rung:
                continue  # It was passed before the sweep was killed.
            is_last = share == 1.0
            ended = [threads.submit(self._run, trial, share, is_last) for trial in mine]
            for one in ended:
                one.result()
            if not is_last:
                self._prune(rung)
        last = max(trial["generation"] for trial in self.db.trials())
        mine = [trial for trial in self.db.trials() if trial["generation"] == last]
        if all(trial["state"] == "failed" for trial in mine):
            reason = mine[0]["reason"]
            raise DlctlError(
                f"all trials of a generation have failed: {reason}",
                where=str(self.directory),
                hint=f"dlctl logs -j {mine[0]['run']}, then dlctl sweep --resume {self.directory}",
            )

    def _prune(self, rung: int) -> None:
        """End the worst of those that have made it here."""
        mine = [trial for trial in self.db.trials() if trial["state"] not in ENDED]
        mine.sort(key=lambda trial: (_or_worst(trial["score"]), trial["number"]))
        numbers, kept = [trial["number"] for trial in mine], max(1, round(len(mine) * KEPT))
        self.db.prune(numbers[kept:], numbers[:kept], rung)

    # ------------------------------------------------------------ one trial

    def _run(self, trial: Json, share: float, is_last: bool) -> None:
        number = trial["number"]
        if self._stopped.is_set():
            return  # It stays as it is, for the next command.
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
            self.db.set(number, state="failed", reason=error.message)

    def _take(self, number: int, figures: Json, is_last: bool) -> None:
        more = self.best.end == "max"
        value = best_value(figures, self.best.metric, is_more_better=more)
        if figures["state"] != "finished" or value is None:
            missing = f"no evaluation has {self.best.metric}"
            reason = figures["reason"] if figures["state"] != "finished" else missing
            self.db.set(number, state="failed", reason=str(reason))
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
        file = Path(self.plan.file)
        return _shortened(simulate.read(file, changes), file, changes, share)


def _shortened(start: Start, file: Path, changes: Mapping[str, Any], share: float) -> Start:
    """The job with this share of its length."""
    if share == 1.0:
        return start
    stop, shorter = start.job.job.stop, dict(changes)
    for key in ("epochs", "steps", "samples"):
        if (value := getattr(stop, key)) is not None:
            part = value * share
            shorter[f"job.stop.{key}"] = part if key == "epochs" else max(1, round(part))
    return simulate.read(file, shorter)


def _or_worst(score: float | None) -> float:
    return float("inf") if score is None else score


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
    SAMPLERS[plan.sampler](found, plan.seed)
    for changes in _samples(found):
        job = simulate.read(file, changes).job  # A wrong key or type is told now.
    metric = str(_metric(plan.metric or job.checkpoints.best))
    if plan.pruner != "none" and job.job.stop.seconds and not _has_length(job.job.stop):
        raise UsageError("a pruner needs a job that stops after epochs, steps or samples")
    parent = (file.parent / job.job.run_dir).resolve()
    directory = parent / f"{job.job.name}-sweep-{secrets.token_hex(2)}"
    directory.mkdir(mode=paths.PRIVATE, parents=True)
    with closing(SweepDb(directory, create=True)) as db:
        db.put_plan({**asdict(plan), "metric": metric, "file": str(file.resolve())})
    return directory


def _has_length(stop: Any) -> bool:
    return any(getattr(stop, key) is not None for key in ("epochs", "steps", "samples"))


def _samples(axes: Mapping[str, space.Axis]) -> Iterator[Json]:
    """Points that have every value of every choice, and both ends of every interval."""
    values = {
        key: axis.values
        if isinstance(axis, space.Choices)
        else tuple(int(v) if axis.is_whole else v for v in (axis.low, axis.high))
        for key, axis in axes.items()
    }
    for n in range(max(map(len, values.values()))):
        yield {key: each[min(n, len(each) - 1)] for key, each in values.items()}


def resume(directory: Path, slots: int, show: Callable[[str], None] = notes.note) -> None:
    """Run a sweep until its end, or from where it was killed. Raises DlctlError if another process
    runs it.
    """
    with closing(SweepDb(directory)) as db, _alone(directory):
        for trial in db.trials():
            if trial["state"] == "running":
                db.set(trial["number"], state="preempted")
        done = sum(trial["state"] in ENDED for trial in db.trials())
        show(f"{directory.name}: {done} trials have ended")
        Sweep(directory, db).run(slots)


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
