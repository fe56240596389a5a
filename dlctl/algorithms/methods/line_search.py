"""Line searches: the step along a direction of descent, by values of f along it.

Each is a generator. It yields the next step t to try and is sent (f(t), f'(t)), the loss there and
the slope along the direction; it returns the step to take, which is the last trial, or None if no
step decreases f. A loss that is not finite is a step too far.

    Armijo         f(t) - f(0) <= c1 t f'(0): halve t repeatedly (backtracking)
    strong Wolfe   and |f'(t)| <= c2 |f'(0)|: Nocedal and Wright, Numerical Optimization, 2006,
                   Alg. 3.5 and 3.6, with the minimum of the cubic between two trials
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple

Search = Generator[float, tuple[float, float], float | None]
EDGE = 0.1
"""A trial between two others is no closer to either than this fraction of their distance."""


class Trial(NamedTuple):
    step: float
    loss: float
    slope: float


class Conditions(NamedTuple):
    loss: float
    """f(0), the loss where the search begins."""
    slope: float
    """f'(0) < 0, the slope where the search begins."""
    c1: float
    c2: float = 0.9

    def descends(self, trial: Trial) -> bool:
        """Whether the step decreases f enough (Armijo). It compares differences: added to the loss,
        a small decrease would be rounded away.
        """
        return trial.loss - self.loss <= self.c1 * trial.step * self.slope

    def is_flat(self, trial: Trial) -> bool:
        return abs(trial.slope) <= -self.c2 * self.slope


def armijo(first: float, trials: int, wanted: Conditions) -> Search:
    step = first
    for _ in range(trials):
        if wanted.descends(Trial(step, *(yield step))):
            return step
        step /= 2
    return None


def strong_wolfe(first: float, trials: int, wanted: Conditions) -> Search:
    """A step that meets the strong Wolfe conditions, or else the best one that decreases f."""
    before = Trial(0.0, wanted.loss, wanted.slope)
    step = first
    for number in range(trials):
        here = Trial(step, *(yield step))
        if not wanted.descends(here) or (number and here.loss >= before.loss):
            return (yield from _zoom(before, here, trials - number - 1, wanted))
        if wanted.is_flat(here):
            return step
        if here.slope >= 0:
            return (yield from _zoom(here, before, trials - number - 1, wanted))
        before, step = here, 2 * step
    return before.step


def _zoom(low: Trial, high: Trial, trials: int, wanted: Conditions) -> Search:
    """A good step between `low`, the best decreasing one, and `high`: there is one."""
    newest = low
    for _ in range(trials):
        step = _between(low, high)
        newest = Trial(step, *(yield step))
        if not wanted.descends(newest) or newest.loss >= low.loss:
            high = newest
            continue
        if wanted.is_flat(newest):
            return step
        if newest.slope * (high.step - low.step) >= 0:
            high = low
        low = newest
    if low.step and newest is not low:
        yield low.step
    return low.step or None


def _between(a: Trial, b: Trial) -> float:
    """The minimum of the cubic through both trials, if it is well between them."""
    middle, width = (a.step + b.step) / 2, abs(b.step - a.step)
    if not all(map(math.isfinite, (*a, *b))):
        return middle
    d1 = a.slope + b.slope - 3 * (a.loss - b.loss) / (a.step - b.step)
    square = d1 * d1 - a.slope * b.slope
    if square < 0:
        return middle
    d2 = math.copysign(math.sqrt(square), b.step - a.step)
    divisor = b.slope - a.slope + 2 * d2
    if divisor == 0:
        return middle
    least = b.step - (b.step - a.step) * (b.slope + d2 - d1) / divisor
    edge = EDGE * width
    return min(max(least, min(a.step, b.step) + edge), max(a.step, b.step) - edge)
