"""The one cut of a model into shards: contiguous ranges of its flat vector, one for each server.

A unit is a trained tensor. One that is whole is never divided: its optimiser computes with the
matrix, and two halves of it give another result than the whole. All others are divided anywhere.
Whoever needs the shards is given the bounds. They are in the coordinator's records and in every
checkpoint, and are computed by nobody else.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple

from dlctl.errors import UsageError
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.util.text import plural

Bounds = tuple[int, ...]
"""Where the shards begin, and where the last one ends: shard i has the elements [b[i], b[i+1])."""
SHOWN_MAX = 8
"""Names in an error."""
ROUNDS = 60
"""Halvings of the interval in which the least load is: beyond the precision of a float."""


class Unit(NamedTuple):
    name: str
    size: int
    is_whole: bool = False


def units(layout: Layout, is_whole: Callable[[TensorEntry], bool]) -> list[Unit]:
    """The trained tensors, in the order of the flat vector."""
    return [Unit(e.name, e.size, is_whole(e)) for e, _, _ in layout.slices(TRAINED)]


def cut(units: Sequence[Unit], weights: Sequence[float]) -> Bounds:
    """One shard for each weight, in proportion to it: the largest load / weight is minimal among
    contiguous cuts between units, and no load exceeds its share by more than the largest whole
    unit. A shard that would be empty gets one unit; one with a weight of zero is empty.

    Without a whole unit, shards with equal weights differ by at most one element (`slice_bounds`).
    Raises UsageError, naming units, if there are too few for a shard each.
    """
    assert weights, "no shard to cut"
    assert all(0 <= weight < math.inf for weight in weights), f"weights {weights}"
    if not all(weights):
        return _with_empty(cut(units, [weight for weight in weights if weight]), weights)
    places = _Places([unit for unit in units if unit.size])
    if not places.largest:
        return _proportional(places.size, weights)
    if places.count < len(weights):
        raise _too_many(places, len(weights))
    total = math.fsum(weights)
    shares = [places.size * weight / total for weight in weights]
    largest = [share + places.largest for share in shares]
    low, high = 0.0, max(most / share for most, share in zip(largest, shares, strict=True))
    best = _filled(places, largest)
    assert best is not None, "rounding the proportional cut down is such a cut"
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        caps = [min(middle * s, most) for s, most in zip(shares, largest, strict=True)]
        found = _filled(places, caps)
        low, high, best = (middle, high, best) if found is None else (low, middle, found)
    return _none_empty(places, best)


def _with_empty(bounds: Bounds, weights: Sequence[float]) -> Bounds:
    """The bounds of the shards with a weight, with empty ones between them."""
    ends = iter(bounds[1:])
    found = [0]
    for weight in weights:
        found.append(next(ends) if weight else found[-1])
    return tuple(found)


def fits(bounds: Sequence[int], parts: int, size: int) -> bool:
    """Whether these are bounds of so many shards of a vector."""
    ends = [0, *bounds[1:-1], size]
    ascend = all(lo <= hi for lo, hi in pairwise(bounds))
    return len(bounds) == parts + 1 and ascend and (parts == 0 or [*bounds] == ends)


def _proportional(size: int, weights: Sequence[float]) -> Bounds:
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    return (0, *(math.floor(size * part / total) for part in accumulate(exact)))


class _Places:
    """The places where a vector of units may be cut."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """units: without empty ones."""
        self.units = units
        self.starts = list(accumulate((unit.size for unit in units), initial=0))
        self.size = self.starts[-1]
        self.largest = max((u.size for u in units if u.is_whole and u.size > 1), default=0)
        self.count = sum(1 if unit.is_whole else unit.size for unit in units)
        """The most shards that are not empty."""

    def up_to(self, element: int) -> int:
        """The last place that is not behind this element."""
        if element >= self.size:
            return self.size
        index = bisect_right(self.starts, element) - 1
        return self.starts[index] if self.units[index].is_whole else element

    def after(self, place: int) -> int:
        """The next place."""
        index = bisect_right(self.starts, place) - 1
        return self.starts[index + 1] if self.units[index].is_whole else place + 1

    def before(self, place: int) -> int:
        return self.up_to(place - 1)


def _filled(places: _Places, caps: Sequence[float]) -> list[int] | None:
    """Bounds of shards as full as possible, none of more than its cap; None: there are none."""
    bounds = [0]
    for cap in caps:
        bounds.append(places.up_to(min(places.size, bounds[-1] + math.floor(cap))))
    return bounds if bounds[-1] == places.size else None


def _none_empty(places: _Places, bounds: list[int]) -> Bounds:
    """The bounds, with one unit for each shard that has none."""
    last = len(bounds) - 1
    for index in range(1, last):
        if bounds[index] <= bounds[index - 1] < places.size:
            bounds[index] = places.after(bounds[index - 1])
        bounds[index] = max(bounds[index], bounds[index - 1])
    for index in range(last - 1, 0, -1):
        if bounds[index] >= bounds[index + 1]:
            bounds[index] = places.before(bounds[index + 1])
    assert all(lo < hi for lo, hi in pairwise(bounds)), f"an empty shard in {bounds}"
    return tuple(bounds)


def _too_many(places: _Places, servers: int) -> UsageError:
    names = [unit.name for unit in places.units[:SHOWN_MAX]]
    more = ", ..." if len(places.units) > SHOWN_MAX else ""
    what = plural(places.count, "part")
    return UsageError(
        f"{servers} servers, but the model can be cut into {what} only: its optimiser needs "
        f"whole matrices, and the tensors are {', '.join(names)}{more}",
        hint=f"[servers] count = {places.count} is the most for this model and optimizer",
    )
