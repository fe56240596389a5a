"""Who chooses the points of a sweep. A generation depends on the results of earlier ones alone, so
it is the same however many trials run at a time, and after a restart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dlctl.errors import UsageError
from dlctl.study import points
from dlctl.study.space import Axis, Choices, ValueRange, count, every, grid
from dlctl.util import extras

Values = dict[str, Any]
OVERSAMPLED = 4
"""How many points are asked for in place of one, if some were tried already."""
LISTED_MAX = 2**17
"""Points of a space that is listed; more than a sweep has trials."""
DRAWS_MAX = 1000
"""For a point that was not tried, of a larger space."""


@dataclass(frozen=True, slots=True)
class Known:
    """A point that has ended; score: smaller is better, None: it has failed."""

    values: Mapping[str, Any]
    score: float | None
    pruned_at: int | None = None
    """The look of the pruner at which it ended: its score is of a shorter training."""


class Sampler(Protocol):
    space: Mapping[str, Axis]
    seed: int

    def ask(self, generation: int, size: int, known: Sequence[Known]) -> list[Values]:
        """The next points, `size` at most; []: there are no more."""
        ...


class Grid:
    """Every combination, once."""

    def __init__(self, space: Mapping[str, Axis], seed: int) -> None:
        found = grid(space)
        if found is None:
            raise UsageError(
                "a grid has lists of values, and this sweep has ranges",
                hint="--sampler random or tpe, or write the values: inner.lr=0.001,0.01,0.1",
            )
        self.space, self.seed, self._points = space, seed, found

    def ask(self, generation: int, size: int, known: Sequence[Known]) -> list[Values]:
        return self._points[len(known) : len(known) + size]


class Random:
    """Independent draws."""

    def __init__(self, space: Mapping[str, Axis], seed: int) -> None:
        self.space, self.seed = space, seed

    def ask(self, generation: int, size: int, known: Sequence[Known]) -> list[Values]:
        rng = np.random.default_rng([self.seed, generation])
        return [{key: axis.draw(rng) for key, axis in self.space.items()} for _ in range(size)]


class Tpe:
    """Optuna's tree-structured Parzen estimator, on a study that is made anew of what is known: no
    storage and no heartbeat of Optuna's is used.
    """

    def __init__(self, space: Mapping[str, Axis], seed: int) -> None:
        extras.require("sweep", "dlctl sweep --sampler tpe")
        self.space, self.seed = space, seed

    def ask(self, generation: int, size: int, known: Sequence[Known]) -> list[Values]:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=self.seed + generation, constant_liar=True)
        study = optuna.create_study(sampler=sampler)
        distributions = {key: _distribution(axis) for key, axis in self.space.items()}
        for point in known:
            if point.score is not None:
                params = _stored(self.space, point.values)
                study.add_trial(_told(point.score, point.pruned_at, params, distributions))
        asked = [study.ask(distributions).params for _ in range(size)]
        return [_given(self.space, params) for params in asked]


def _told(score: float, pruned_at: int | None, params: Values, distributions: Values) -> Any:
    """A trial of Optuna's: it ranks what was pruned below all that is complete, by its look."""
    from optuna.trial import TrialState, create_trial

    if pruned_at is None:
        return create_trial(params=params, distributions=distributions, value=score)
    return create_trial(
        state=TrialState.PRUNED,
        params=params,
        distributions=distributions,
        intermediate_values={pruned_at: score},
    )


def _distribution(axis: Axis) -> Any:
    from optuna import distributions as of

    if isinstance(axis, Choices):
        return of.CategoricalDistribution(list(range(len(axis.values))))
    if axis.is_whole:
        return of.IntDistribution(int(axis.low), int(axis.high), log=axis.is_log)
    return of.FloatDistribution(axis.low, axis.high, log=axis.is_log)


def _stored(space: Mapping[str, Axis], values: Mapping[str, Any]) -> Values:
    """Choices by their index, as Optuna takes only some types."""
    return {
        key: axis.values.index(values[key]) if isinstance(axis, Choices) else values[key]
        for key, axis in space.items()
    }


def _given(space: Mapping[str, Axis], params: Mapping[str, Any]) -> Values:
    return {
        key: axis.values[params[key]] if isinstance(axis, Choices) else params[key]
        for key, axis in space.items()
    }


SAMPLERS: dict[str, type[Grid] | type[Random] | type[Tpe]] = {
    "grid": Grid, "random": Random, "tpe": Tpe,
}  # fmt: skip


def untried(sampler: Sampler, generation: int, size: int, known: Sequence[Known]) -> list[Values]:
    """The next points of a sampler, without those that were tried; [] if all were."""
    tried = {points.name(point.values) for point in known}
    total = count(sampler.space)
    size = int(min(size, max(0, total - len(tried))))
    found: dict[str, Values] = {}
    for point in _asked(sampler, generation, size, known):
        if len(found) == size:
            break
        if (called := points.name(point)) not in tried:
            found.setdefault(called, point)
    return list(found.values())


def _asked(
    sampler: Sampler, generation: int, size: int, known: Sequence[Known]
) -> Iterator[Values]:
    """Points, some of them perhaps several times: first those that the sampler likes best."""
    yield from sampler.ask(generation, size, known)
    yield from sampler.ask(generation, OVERSAMPLED * size, known)
    rng = np.random.default_rng([sampler.seed, generation, 1])
    if count(sampler.space) <= LISTED_MAX:  # So that the last points of a space are found, too.
        listed = list(every(sampler.space))
        yield from (listed[at] for at in rng.permutation(len(listed)))
    for _ in range(DRAWS_MAX * size):
        yield {key: axis.draw(rng) for key, axis in sampler.space.items()}


def importances(space: Mapping[str, Axis], known: Sequence[Known]) -> dict[str, float]:
    """Key -> the share of the scores' variance that its value explains, by ranks: the squared
    correlation of Spearman for numbers, the correlation ratio for choices. 0 if too few are known.
    """
    scored = [trial for trial in known if trial.score is not None]
    if len(scored) < 4:
        return dict.fromkeys(space, 0.0)
    ranks = _ranks([float(trial.score or 0.0) for trial in scored])
    return {
        key: _explained(axis, [t.values[key] for t in scored], ranks) for key, axis in space.items()
    }


def _explained(axis: Axis, values: Sequence[Any], ranks: np.ndarray[Any, Any]) -> float:
    total = float(((ranks - ranks.mean()) ** 2).sum())
    if not total:
        return 0.0
    if isinstance(axis, ValueRange):
        own = _ranks([float(value) for value in values])
        spread = float(((own - own.mean()) ** 2).sum())
        together = float(((own - own.mean()) * (ranks - ranks.mean())).sum())
        return together**2 / (spread * total) if spread else 0.0
    between = 0.0
    order = sorted(range(len(values)), key=lambda at: str(values[at]))
    for _, group in itertools.groupby(order, key=lambda at: str(values[at])):
        mine = ranks[list(group)]
        between += len(mine) * float(mine.mean() - ranks.mean()) ** 2
    return between / total


def _ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
    array = np.array(values)
    return np.array([(array < v).sum() + ((array == v).sum() - 1) / 2 for v in array])
