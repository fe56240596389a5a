"""The "auto" interval: the number of steps from one push, or one fetch, to the next.

The goal is the smallest interval n for which a worker is idle for at most a given share of its
time: a longer interval makes gradients staler. With c seconds of computing per step, a link that
can take one push every b seconds, and r seconds of waiting per fetch at any interval (0 if
computing continues meanwhile), the idle time in n steps is

    pause(n) = r + max(0, b - n c)          share(n) = pause(n) / (n c + pause(n))

c and r are measured directly. b is the larger of the limit's time (bytes / rate) and the time from
when a push was made, or the previous one completed, to its answer. This is exact on a link that
carries one push at a time. It is too long if most of it is round-trip latency, which several
pushes can share, and too short if others push over the same link as soon as this worker does.
So the interval of pushes

- is raised when the waiting over the last cycles without the worst of them (one stall is no slow
  link) exceeded the share: at once to the n that keeps the share, at most by a factor of four;
- is lowered when the prediction for a shorter one is at most half of the share, so that noise does
  not revert it, and that one was not found too short at about this b before. If there was no
  waiting, and no interval was found too short, an eighth less is tried occasionally.

Fetches run one at a time, so the measurement is complete, and share(n) replaces the measured
waiting. If the method does not wait for a fetch, b is its latency: the next one is due when it has
arrived. If the method waits for its fetches, they also wait for the pushes before them, and vice
versa.

The rule is ours. The known rule for the interval of local updates, AdaComm (Wang and Joshi, SysML
2019), depends on the loss and not on the link. b is measured much as the bottleneck is in BBR
(Cardwell et al., ACM Queue 2016).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from dlctl.algorithms.base import ReplicaSide
from dlctl.roles.protocol.meters import median
from dlctl.roles.worker.send_queue import Limiter
from dlctl.settings import AUTO

CYCLES_KEPT = 16
"""Cycles since the last change over which the waiting is averaged."""
COSTS_KEPT = 5
"""An interval is raised by their median and lowered by their maximum, so one outlier has no effect.
"""
PATIENCE_MIN, PATIENCE_MAX = 2, 32
"""Cycles before an interval is lowered."""
GROWTH_MAX = 4
SHRINKING = 8
"""A step down without a prediction lowers the interval by 1/8."""
SURE = 0.5
"""Fraction of the share that a lower interval must keep."""
PROBES = 8
"""Cycles after which a lower interval is tried without a prediction."""
ALIKE = 1.25
"""A cost lower by more than this factor is that of another link."""
LONGER = 1.1
"""Minimum ratio of the time of an interval to that of one that was found too short."""


@dataclass(slots=True)
class Cycle:
    """From one push (or fetch) to the next."""

    computed_s: float = 0.0
    waited_s: float = 0.0
    """Idle time because of this direction."""
    nbytes: int = 0
    """Charged to the limit."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    step_s: float
    """Of computing."""
    bytes_per_s: float | None
    """The limit, if there is one."""
    share_max: float
    """Maximum share of the time for waiting."""
    pipelined: bool
    """Several may be in flight at once, so the measured waiting is more exact than one's latency.
    """


class Prediction(NamedTuple):
    """A worker's idle time at any interval: c, b and r of the module docstring."""

    step_s: float
    cost_s: float
    pause_s: float

    def share(self, steps: int) -> float:
        computed_s = steps * self.step_s
        pause_s = self.pause_s + max(0.0, self.cost_s - computed_s)
        return pause_s / (computed_s + pause_s) if pause_s else 0.0

    def smallest(self, share_max: float, steps_max: int) -> int:
        """The smallest interval that keeps the share, or `steps_max` if none does."""
        steps = range(1, steps_max)
        return 1 + bisect_left(steps, True, key=lambda n: self.share(n) <= share_max)


class Interval:
    """The interval of one direction: `steps`, from 1 to `steps_max`, initially 1."""

    def __init__(self, steps_max: int) -> None:
        self.steps = 1
        self.steps_max = steps_max
        self._forget()

    def begin(self, steps: int) -> None:
        """Continue from an interval that was set explicitly."""
        self._forget()
        self.steps = min(steps, self.steps_max)

    def _forget(self) -> None:
        self.is_bound = False
        """Whether the waiting exceeds the share even at the largest interval."""
        self._costs: deque[float] = deque(maxlen=COSTS_KEPT)
        self._pauses: deque[float] = deque(maxlen=COSTS_KEPT)
        self._rate: float | None = None
        self._patience, self._has_lowered = PATIENCE_MIN, False
        """Cycles before a lower interval; whether the last change was to one. It is doubled when
        that was wrong: a link with bursts looks fast in between."""
        self._change(self.steps)
        self._too_short: tuple[float, float] | None = None
        """(cost, time) of the longest interval that was found too short, in seconds."""

    # ------------------------------------------------------------ what was measured

    def took(self, cost_s: float, pause_s: float = 0.0) -> None:
        """The time of one push or fetch, measured from the completion of the previous one. pause_s:
        the waiting for it that is independent of the interval, and not part of the cost.
        """
        self._costs.append(cost_s)
        self._pauses.append(pause_s)

    def ended(self, cycle: Cycle) -> None:
        """A cycle is complete."""
        self._cycles.append(cycle)
        self._age += 1

    def decide(self, now: Circumstances) -> None:
        """Change `steps`, if the measurements since the last change require it."""
        if now.bytes_per_s != self._rate:
            self._rate = now.bytes_per_s
            self._too_short = None
            self._patience, self._has_lowered = PATIENCE_MIN, False
        if self._age >= PATIENCE_MAX:
            self._patience, self._has_lowered = PATIENCE_MIN, False
        if self._age < max(2, 4 - self.steps // 4):
            return
        usual, worst = self._predict(now, median), self._predict(now, _largest)
        if self._too_short is not None and worst.cost_s < self._too_short[0] / ALIKE:
            self._too_short = None
        waited = self._waited() if now.pipelined else usual.share(self.steps)
        self.is_bound = waited > now.share_max and self.steps == self.steps_max
        if waited > now.share_max:
            self._raise(usual, now, waited)
        else:
            self._lower(worst, now, never_waited=waited == 0.0)

    def _limit_s(self, now: Circumstances) -> float:
        if now.bytes_per_s is None:
            return 0.0
        return median(c.nbytes for c in self._cycles) / now.bytes_per_s

    def _predict(self, now: Circumstances, of: Callable[[Iterable[float]], float]) -> Prediction:
        limit_s = self._limit_s(now)
        explained_s = max(0.0, limit_s - self.steps * now.step_s)
        pause_s = max(0.0, of(self._pauses) - explained_s)
        return Prediction(now.step_s, max(limit_s, of(self._costs)), pause_s)

    def _waited(self) -> float:
        """The share of the time spent waiting, without the worst cycle."""
        cycles = sorted(self._cycles, key=lambda c: c.waited_s)[:-1]
        waited_s = sum(c.waited_s for c in cycles)
        return waited_s / (waited_s + sum(c.computed_s for c in cycles)) if waited_s else 0.0

    # ------------------------------------------------------------ the rule

    def _raise(self, link: Prediction, now: Circumstances, waited: float) -> None:
        if self._has_lowered:
            self._patience = min(2 * self._patience, PATIENCE_MAX)
        self._has_lowered = False
        time_s = self.steps * now.step_s
        if time_s < ALIKE * link.cost_s:  # Else the waiting had another cause, such as a stall.
            self._too_short = (link.cost_s, time_s)
        wanted = max(self.steps + 1, link.smallest(now.share_max, self.steps_max))
        if wanted == self.steps + 1 and waited > 2 * now.share_max:
            wanted = 2 * self.steps  # The measurements do not explain it: a long round trip.
        self._change(min(wanted, GROWTH_MAX * self.steps, self.steps_max))

    def _lower(self, link: Prediction, now: Circumstances, *, never_waited: bool) -> None:
        careful = self.steps - max(1, self.steps // SHRINKING)
        wanted = link.smallest(SURE * now.share_max, self.steps_max)
        if self._too_short is not None and now.step_s:
            wanted = max(wanted, ceil(LONGER * self._too_short[1] / now.step_s))
        if wanted < self.steps and self._age >= self._patience:
            self._has_lowered = True
            self._change(wanted)
        elif never_waited and self._may_try(careful, now):
            self._change(careful)

    def _may_try(self, steps: int, now: Circumstances) -> bool:
        """Whether to try a lower interval against the prediction."""
        is_time = now.pipelined and self._too_short is None and self._age >= PROBES
        return is_time and steps >= 1 and steps * now.step_s >= self._limit_s(now)

    def _change(self, steps: int) -> None:
        self.steps = steps
        self._cycles: deque[Cycle] = deque(maxlen=CYCLES_KEPT)
        self._age = 0


def _largest(values: Iterable[float]) -> float:
    return max(values, default=0.0)


PUSH, FETCH = "push", "fetch"
STEPS_KEPT = 63
REPORT_S_MIN = 0.5
"""Over less time the share would be noise; the last one is reported again."""


class Pacing:
    """Measures a replica's time, and sets its intervals accordingly.

    A worker computes, waits for an answer of the servers, or has no data. The first two are
    measured here; the share of the second is reported, and bounded where an interval is "auto".
    """

    def __init__(self, side: ReplicaSide, limiters: dict[str, Limiter]) -> None:
        self.side = side
        self.limiters = limiters
        self.automatic = side.automatic()
        """Direction -> bounds of its interval, for directions whose interval is a method's option.
        """
        self.intervals = {d: Interval(bounds.steps_max) for d, bounds in self.automatic.items()}
        self.computed_s = self.waited_s = 0.0
        self._cycles = {PUSH: Cycle(), FETCH: Cycle()}
        self._charged = dict.fromkeys(self._cycles, 0)
        """Bytes charged to the limits when the current cycles began."""
        self._recent_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._waits_for, self._since = "", 0.0
        self._pushed_at: dict[int, float] = {}
        self._settled_at = 0.0
        """When the newest settled push was settled."""
        self._fetching_since: float | None = None
        self._fetch_waits = False
        """Whether the method waits for its fetches, so that both directions split the share."""
        self._reported = (0.0, 0.0)
        self._share: float | None = None

    # ------------------------------------------------------------ the replica's time

    def computed(self, seconds: float) -> None:
        """A step has completed and took this long."""
        self.computed_s += seconds
        self._recent_s.append(seconds)
        for cycle in self._cycles.values():
            cycle.computed_s += seconds
        for direction in self.intervals:
            self._follow(direction)

    def waits(self, direction: str, now: float) -> None:
        """The replica is idle because of this direction from now on; "": it is not idle."""
        if self._waits_for:
            seconds = now - self._since
            self.waited_s += seconds
            self._cycles[self._waits_for].waited_s += seconds
        self._waits_for, self._since = direction, now

    # ------------------------------------------------------------ pushes and fetches

    def pushed(self, number: int, now: float) -> None:
        """A push was sent."""
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
        """All shards have answered; idempotent."""
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
        """An interval that becomes "auto" continues from its previous number."""
        key, interval = self.automatic[direction].key, self.intervals[direction]
        steps = getattr(self.side.options, key)
        if steps != AUTO and min(steps, interval.steps_max) != interval.steps:
            interval.begin(steps)
        self.side.intervals[key] = interval.steps

    def _decide(self, direction: str) -> None:
        key, interval = self.automatic[direction].key, self.intervals[direction]
        if getattr(self.side.options, key) != AUTO or not self._recent_s:
            return
        share_max = self.automatic[direction].share_max / (2 if self._fetch_waits else 1)
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
        """{"intervals": {key: effective steps}, "bound": {key: the bound that is too low for its
        link}, "wait_share": of the time since an earlier report}.

        The share is missing until there is a measurement.
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
            keys = [bounds.key for bounds in self.automatic.values()]
            found["intervals"] = {key: self.side.interval(key) for key in keys}
            found["bound"] = {
                self.automatic[direction].key: interval.steps_max
                for direction, interval in self.intervals.items()
                if interval.is_bound
                and getattr(self.side.options, self.automatic[direction].key) == AUTO
            }
        return found
