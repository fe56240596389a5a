"""What a claim is, where it runs, and how it is judged.

All claims are judged by one rule. Each part of a criterion gives a number for each seed, its
margin: above zero if that seed is as the paper says. A part holds if at least four fifths of the
seeds have a margin above zero and the median margin is larger than the spread, the range between
the quartiles. It is refuted if that is true of the margins with the opposite sign.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from dlctl.records.best import Target
from dlctl.study.judging import SHARE, Middle, reached

Json = dict[str, Any]
Row = list[float]
"""A value for each seed."""
SEEDS_MIN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One side of an experiment: a method with some keys of the job file, in some conditions."""

    method: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the job file with other values than the lab's job and the method's defaults."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """Of the `SimulationRequest`: spread, slow, link, kill_every_s."""

    def having(self, changes: Mapping[str, Any]) -> Arm:
        """The same with some more changes."""
        return Arm(
            method=self.method, changes={**self.changes, **changes}, conditions=self.conditions
        )

    def under(self, **conditions: Any) -> Arm:
        """The same in other conditions."""
        return Arm(
            method=self.method,
            changes=self.changes,
            conditions={**self.conditions, **conditions},
        )


@dataclass(frozen=True, slots=True)
class Ran:
    """A simulated run that has ended."""

    figures: Json
    """`run_figures.of_run`."""
    weights: Any
    """float32[d], the servers' last parameters; None without servers."""
    simulated: Json
    """How it was simulated, and what the simulator saw."""

    def final(self, metric: str) -> float:
        """A metric of the last evaluation."""
        return float((self.figures["evaluation"] or {})[metric])

    def cost(self, measure: str, target: str) -> float | None:
        """What the run had cost when it first reached the target ("accuracy >= 0.9"): "seconds",
        "bytes" or "samples". None: it never did.
        """
        found = reached(self.figures, Target.parse(target))
        return None if found is None else float(getattr(found, measure))


class Lab(Protocol):
    """Where claims run."""

    @property
    def seeds(self) -> Sequence[int]:
        """Those of the final runs; paired: all arms have the same ones."""
        ...

    def place(self, example: str, job: str = "", files: Mapping[str, str] | None = None) -> None:
        """The job file of all further arms, and what is beside it: the files of an example, and
        others by their names.
        """
        ...

    def tuned(self, arms: Mapping[str, Arm], target: str, trials: int) -> dict[str, Arm]:
        """Each arm with its rates, and no other keys, tuned by so many trials on a seed that no
        final run has. target: as `job.stop.target`; what reaches it sooner is better, and of those
        that do not, what comes closest.
        """
        ...

    def run(self, arms: Mapping[str, Arm]) -> dict[str, list[Ran | None]]:
        """Every arm with every seed; None: that run has failed."""
        ...

    def loop(self, name: str, request: Json) -> Json:
        """The answer of a loop with torch that is no run: `python -m daemons.simulator.loops`."""
        ...


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an experiment has found."""

    margins: Mapping[str, Row]
    """Part of the criterion -> its margins."""
    figures: Mapping[str, Mapping[str, Row]]
    """Measure, with its unit -> arm -> a value for each seed."""
    notes: Sequence[str] = ()
    """Such as the tuned values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperClaim:
    paper: str
    sentence: str
    """What it says, in our words."""
    setup: str
    measure: str
    criterion: Mapping[str, str]
    """Part -> when it holds, as a sentence."""
    experiment: Callable[[Lab], Evidence]
    seeds: int = SEEDS_MIN
    minutes: float
    """About so long it takes on one core."""
    figure: str = ""
    """The measure to draw; "": the first."""
    remark: str = ""
    """How the outcome is to be read, for the page."""


class ClaimOutcome(StrEnum):
    SHOWN = "shown"
    NOT_SHOWN = "not shown"
    REFUTED = "refuted"


def judged(margins: Sequence[float]) -> ClaimOutcome:
    """The outcome of one part of a criterion."""
    middle = Middle.of(margins)
    if middle is None or len(margins) < SEEDS_MIN:
        return ClaimOutcome.NOT_SHOWN
    spread = middle.high - middle.low
    for sign, outcome in ((1, ClaimOutcome.SHOWN), (-1, ClaimOutcome.REFUTED)):
        agree = sum(sign * margin > 0 for margin in margins)
        if agree >= SHARE * len(margins) and sign * middle.median > spread:
            return outcome
    return ClaimOutcome.NOT_SHOWN


def outcome(margins: Mapping[str, Sequence[float]]) -> ClaimOutcome:
    """Of the whole claim: shown if all parts are, refuted if one is."""
    parts = {judged(of_part) for of_part in margins.values()}
    if parts == {ClaimOutcome.SHOWN}:
        return ClaimOutcome.SHOWN
    return ClaimOutcome.REFUTED if ClaimOutcome.REFUTED in parts else ClaimOutcome.NOT_SHOWN


def less(first: Sequence[float], second: Sequence[float]) -> Row:
    """The margins of "the first is less than the second"."""
    return [b - a for a, b in zip(first, second, strict=True)]


def within(values: Sequence[float], bound: float) -> Row:
    """The margins of "the values are at most `bound`"."""
    return [bound - value for value in values]


def finals(runs: Sequence[Ran | None], metric: str, if_failed: float) -> Row:
    """The last value of a metric of each run."""
    return [
        if_failed if run is None or run.figures["evaluation"] is None else run.final(metric)
        for run in runs
    ]


def costs(runs: Sequence[Ran | None], measure: str, target: str, if_never: float) -> Row:
    """`Ran.cost` of each run. if_never: in place of that of a run that has not reached it."""
    found = [None if run is None else run.cost(measure, target) for run in runs]
    return [if_never if cost is None else cost for cost in found]


def changes_of(arms: Mapping[str, Arm], keys: Sequence[str]) -> list[str]:
    """Notes of the values of some keys: "sgd: optimizer.lr 0.1"."""
    found = []
    for name, arm in arms.items():
        values = [f"{key} {arm.changes[key]:g}" for key in keys if key in arm.changes]
        if values:
            found.append(f"{name}: {', '.join(values)}")
    return found
