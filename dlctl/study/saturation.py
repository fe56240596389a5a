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
    row = ([*windows[:1], *free(windows)])[-1]
    found = [
        Saturation(kind, busy["name"], row["workers"] * FULL / busy["share"])
        for kind in SHARED
        if (busy := row["busy"].get(kind)) is not None and busy["share"] > 0
    ]
    return min(found, key=lambda each: each.workers, default=None)


def tells(row: Mapping[str, Any]) -> bool:
    """Whether a window says how many steps its workers make: one that was cut may have ended within
    the first round.
    """
    return bool(row["steps_per_s"] > 0 and (row["is_whole"] or all(row["halves"])))


def free(windows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those in which nothing is saturated. Few workers show how many steps each usually makes."""
    told = [row for row in windows if tells(row)]
    usual = told[0]["steps_per_s"] / told[0]["workers"] if told else 0.0
    return [
        row
        for row in told
        if row["steps_per_s"] / row["workers"] >= SLOWED * usual and _fullest(row) < FULL
    ]


def _fullest(row: Mapping[str, Any]) -> float:
    return max(float(row["busy"].get(kind, {"share": 0.0})["share"]) for kind in SHARED)


def error(windows: Sequence[Mapping[str, Any]]) -> float | None:
    """Of an extrapolation: the busiest share that the window before foretells for the largest one,
    relative to what was simulated there; None if something is saturated in one of them, if one was
    cut too early to tell, or if nothing is busy.
    """
    known = free(windows)[-2:]
    if len(windows) < 2 or known != list(windows[-2:]):
        return None
    small, large = known
    found = first([large])
    there, here = (row["busy"].get(found.kind) if found else None for row in (large, small))
    if not there or not here or not there["share"]:
        return None
    factor = large["workers"] / small["workers"]
    return float(here["share"] * factor / there["share"] - 1)


def spread(row: Mapping[str, Any]) -> float | None:
    """Half of the difference between the halves of a window, relative: the error of its rates. None
    if it was cut too early to tell.
    """
    one, two = row["halves"]
    if not tells(row) or one is None or two is None:
        return None
    return float(abs(one - two) / (one + two))
