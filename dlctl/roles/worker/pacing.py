"""What a replica measures of its own time, and the intervals that follow from it (`pace`).

A worker computes, or it stands still for an answer of the servers, or it has no data. The first two
are measured here; the share of the second is told to everybody and bounded where an interval is
"auto".
"""

from __future__ import annotations

from collections import deque
from typing import Any

from dlctl.algorithms.base import WorkerSide
from dlctl.roles.protocol.meters import median
from dlctl.roles.worker.limiter import Limiter
from dlctl.roles.worker.pace import Circumstances, Cycle, Interval
from dlctl.settings import AUTO

PUSH, FETCH = "push", "fetch"
STEPS_KEPT = 63
REPORT_S_MIN = 0.5
"""A share of less time would be noise: the last one is reported again."""


def interval_key(direction: str) -> str:
    """The option of a method that says how many steps there are from one to the next."""
    return f"{direction}_every_steps"


class Pacing:
    def __init__(self, side: WorkerSide, limiters: dict[str, Limiter]) -> None:
        self.side = side
        self.limiters = limiters
        self.intervals = {
            direction: Interval(side.options.auto_steps_max)
            for direction in (PUSH, FETCH)
            if hasattr(side.options, interval_key(direction))
            and hasattr(side.options, "auto_steps_max")
        }
        self.computed_s = self.waited_s = 0.0
        self._cycles = {PUSH: Cycle(), FETCH: Cycle()}
        self._charged = dict.fromkeys(self._cycles, 0)
        """Bytes that the limits had been charged for when the present cycles began."""
        self._recent_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._waits_for, self._since = "", 0.0
        self._pushed_at: dict[int, float] = {}
        self._settled_at = 0.0
        """The newest push that was settled."""
        self._fetching_since: float | None = None
        self._fetch_waits = False
        """Whether the method waits for its fetches, so that both directions share what there is."""
        self._reported = (0.0, 0.0)
        self._share: float | None = None

    # ------------------------------------------------------------ the replica's time

    def computed(self, seconds: float) -> None:
        """A step is done; it took so long."""
        self.computed_s += seconds
        self._recent_s.append(seconds)
        for cycle in self._cycles.values():
            cycle.computed_s += seconds
        for direction in self.intervals:
            self._follow(direction)

    def waits(self, direction: str, now: float) -> None:
        """The replica stands still for this direction from now on; "": it does not."""
        if self._waits_for:
            seconds = now - self._since
            self.waited_s += seconds
            self._cycles[self._waits_for].waited_s += seconds
        self._waits_for, self._since = direction, now

    # ------------------------------------------------------------ pushes and fetches

    def pushed(self, number: int, now: float) -> None:
        """A push is on its way."""
        self.waits("", now)
        self._pushed_at[number] = now
        self._end_cycle(PUSH)

    def settled(self, number: int, now: float) -> None:
        """All shards have settled a push."""
        begun_at = max(self._pushed_at.pop(number), self._settled_at)
        self._settled_at = now
        self._took(PUSH, now - begun_at)

    def fetch_began(self, now: float, *, waits: bool) -> None:
        self._fetching_since, self._fetch_waits = now, waits
        self._end_cycle(FETCH)

    def fetched(self, now: float) -> None:
        """All shards have answered; may be said twice."""
        if self._fetching_since is None:
            return
        took_s, self._fetching_since = now - self._fetching_since, None
        self._took(FETCH, *((0.0, took_s) if self._fetch_waits else (took_s, 0.0)))

    # ------------------------------------------------------------ the intervals

    def _end_cycle(self, direction: str) -> None:
        cycle, self._cycles[direction] = self._cycles[direction], Cycle()
        spent = self.limiters[direction].spent_bytes
        cycle.nbytes, self._charged[direction] = spent - self._charged[direction], spent
        if direction in self.intervals and cycle.computed_s:
            self.intervals[direction].ended(cycle)
            self._decide(direction)

    def _took(self, direction: str, cost_s: float, pause_s: float = 0.0) -> None:
        if direction in self.intervals:
            self.intervals[direction].took(cost_s, pause_s)
            self._decide(direction)

    def _follow(self, direction: str) -> None:
        """What becomes "auto" goes on from the number that it was before."""
        key, interval = interval_key(direction), self.intervals[direction]
        steps = getattr(self.side.options, key)
        if steps != AUTO and min(steps, interval.steps_max) != interval.steps:
            interval.begin(steps)
        self.side.intervals[key] = interval.steps

    def _decide(self, direction: str) -> None:
        key, interval = interval_key(direction), self.intervals[direction]
        if getattr(self.side.options, key) != AUTO or not self._recent_s:
            return
        share_max = self.side.options.comm_share_max / (2 if self._fetch_waits else 1)
        interval.decide(
            Circumstances(
                step_s=median(self._recent_s),
                bytes_per_s=self.limiters[direction].bytes_per_s,
                share_max=share_max,
                pipelined=direction == PUSH and not self._fetch_waits,
            )
        )
        self.side.intervals[key] = interval.steps

    # ------------------------------------------------------------ figures

    def metrics(self, now: float) -> dict[str, Any]:
        """{"intervals": {key: steps in force}, "bound": {key: the bound that is too low for its
        link}, "wait_share": of the time since an earlier report}.

        The share is missing while there is nothing to measure.
        """
        self.waits(self._waits_for, now)
        computed_s, waited_s = (
            total - before
            for total, before in zip((self.computed_s, self.waited_s), self._reported, strict=True)
        )
        if computed_s + waited_s >= REPORT_S_MIN:
            self._share = round(waited_s / (computed_s + waited_s), 3)
            self._reported = (self.computed_s, self.waited_s)
        found: dict[str, Any] = {} if self._share is None else {"wait_share": self._share}
        if self.intervals:
            keys = map(interval_key, self.intervals)
            found["intervals"] = {key: self.side.interval(key) for key in keys}
            found["bound"] = {
                interval_key(direction): interval.steps_max
                for direction, interval in self.intervals.items()
                if interval.is_bound and getattr(self.side.options, interval_key(direction)) == AUTO
            }
        return found
