"""Where many workers would wait, from windows of different sizes without gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
FULL = 0.9
"""What is busy for so much of the time is saturated: queues grow before it is always busy."""
SHARED = ("coordinator", "server", "link")
"""What workers wait for in common; not their own links ("own_link")."""
SLOWED = 0.5
"""Where workers make fewer steps than this share of those of few workers, they wait for something,
although it may never be busy for long: after a barrier all of them fetch, and then all push.
"""


@dataclass(frozen=True, slots=True)
class Saturation:
    """What saturates first."""

    kind: str
    """ "coordinator", "server" or "link"."""
    name: str
    """The daemon, or the machine and the direction of its card."""
    workers: float
    """As many saturate it."""


def first(windows: Sequence[Mapping[str, Any]]) -> Saturation | None:
    """windows: the smaller ones first. None: nothing is busy at all.

    The load of each worker is taken from the largest window in which nothing is saturated: where
    something is, workers wait, and load everything else less.
    """
    free = [row for row in windows if is_free(row, windows[0])]
    row = free[-1] if free else windows[0]
    found = [
        Saturation(kind, busy["name"], row["workers"] * FULL / busy["share"])
        for kind in SHARED
        if (busy := row["busy"].get(kind)) is not None and busy["share"] > 0
    ]
    return min(found, key=lambda each: each.workers, default=None)


def is_free(row: Mapping[str, Any], few: Mapping[str, Any]) -> bool:
    """Whether nothing is saturated in a window; one that ended before any step does not tell. few:
    that with the fewest workers.
    """
    one, usual = (each["steps_per_s"] / each["workers"] for each in (row, few))
    shares = (row["busy"].get(kind, {"share": 0.0})["share"] for kind in SHARED)
    return bool(one > 0 and one >= SLOWED * usual and max(shares) < FULL)


def is_known(windows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some window tells the load of each worker: else `first` is a guess."""
    return any(is_free(row, windows[0]) for row in windows)


def error(windows: Sequence[Mapping[str, Any]]) -> float | None:
    """Of an extrapolation: the busiest share that the window before foretells for the largest one,
    relative to what was simulated there; None if something is saturated there, or nothing busy.
    """
    if len(windows) < 2:
        return None
    small, large = windows[-2:]
    found = first([large])
    if found is None or not is_free(large, windows[0]):
        return None
    there, here = (row["busy"].get(found.kind) for row in (large, small))
    if not there or not here or not there["share"]:
        return None
    factor = large["workers"] / small["workers"]
    return float(here["share"] * factor / there["share"] - 1)


def spread(row: Mapping[str, Any]) -> float:
    """Half of the difference between the halves of a window, relative: the error of its rates."""
    one, two = row["halves"]
    return abs(one - two) / (one + two) if one + two else 0.0
