"""Which methods are worth a try on a job, and the answer that a comparison of them gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlctl.study import table
from dlctl.study.variants import WITH

Json = dict[str, Any]
SLOW_LINK_S = 0.1
"""A model that takes as long to be sent once is worth compressing, or sending less often."""


def shortlist(own: str, model_bytes: float, link_bytes_per_s: float | None) -> tuple[str, ...]:
    """The methods to compare: the job's own one, and of each kind that differs the one that most
    people know. link_bytes_per_s: None: no limit.
    """
    is_slow = link_bytes_per_s is not None and model_bytes > SLOW_LINK_S * link_bytes_per_s
    found = [own, "sync", "diloco", "allreduce"]
    found += [f"downpour{WITH}topk", "sparseloco"] if is_slow else ["downpour", "ssp"]
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer to "which method?"."""

    best: Json
    """A row of `table.rows`: of the method to take."""
    rivals: tuple[Json, ...]
    """The next ones, which the seeds cannot tell from it."""
    next: Json | None
    """The best one that is slower than it."""
    cheapest: Json
    """The row that needs the fewest bytes."""

    @property
    def next_costs(self) -> float | None:
        """Time to the target of the next best, relative to the best; None: it never reaches it."""
        if self.next is None or self.next["seconds"] is None:
            return None
        ratio: float = self.next["seconds"]["median"] / self.best["seconds"]["median"]
        return ratio

    @property
    def sureness(self) -> str:
        """How sure it is, in words."""
        reached, seeds = self.best["reached"], self.best["seeds"]
        if reached < seeds:
            return f"not sure: only {reached} of {seeds} seeds reached the target"
        if self.rivals:
            names = " and ".join(row["method"] for row in self.rivals)
            return f"undecided between it and {names}: more --seeds may tell"
        words = f"{seeds} of {seeds} seeds reached the target"
        return f"{words}, and it was faster than the next" if self.next else words


def of(record: Mapping[str, Any]) -> Advice | None:
    """The advice that a comparison gives; None: no method has reached the target."""
    rows = table.rows(record)
    if not rows or not rows[0]["reached"]:
        return None
    best, rivals, after = rows[0], [], None
    costs = table.costs_of(record)
    for row in rows[1:]:
        if row["reached"] and table.is_slower(costs, best, row):
            after = row
            break
        if row["reached"]:
            rivals.append(row)
    reaching = [row for row in rows if row["reached"] == best["reached"]]
    cheapest = min(reaching, key=lambda row: float(row["bytes"]["median"]))
    return Advice(best, tuple(rivals), after, cheapest)
