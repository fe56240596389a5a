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
from math import ceil, inf
from typing import Any, NamedTuple

from dlctl.algorithms.base import Automatic, ReplicaSide
from dlctl.job.settings import AUTO
from dlctl.roles.protocol.meters import median
from dlctl.roles.worker.send_queue import Limiter

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

    def __init__(self, option: Automatic) -> None:
        self.key, self.steps_max, self.share_max = option
        self.begin(1)

    def begin(self, steps: int) -> None:
        """Continue from this one, without measurements."""
        self.is_bound = False
        """Whether the waiting exceeds the share even at the largest interval."""
        self._costs: deque[float] = deque(maxlen=COSTS_KEPT)
        self._pauses: deque[float] = deque(maxlen=COSTS_KEPT)
        self._patience, self._has_lowered = PATIENCE_MIN, False
        """Cycles before a lower interval; whether the last change was to one. It is doubled when
        that was wrong: a link with bursts looks fast in between."""
        self._too_short: tuple[float, float] | None = None
        """(cost, time) of the longest interval that was found too short, in seconds."""
        self._change(min(steps, self.steps_max))

    # ------------------------------------------------------------ what was measured

    def took(self, cost_s: float, pause_s: float = 0.0) -> None:
        """The time of one push or fetch, measured from the completion of the previous one. pause_s:
        the waiting for it that is independent of the interval, and not part of the cost.
        """
        self._costs.append(cost_s)
        self._pauses.append(pause_s)

    def ended(self, computed_s: float, waited_s: float) -> None:
        """The time from one push, or fetch, to the next."""
        self._cycles.append((computed_s, waited_s))
        self._age += 1

    def decide(self, step_s: float, share_max: float, *, pipelined: bool) -> None:
        """Change `steps`, if the measurements since the last change require it.

        step_s: of computing. share_max: of the time, for waiting. pipelined: several may be in
        flight at once, so the measured waiting is more exact than one's latency.
        """
        if self._age >= PATIENCE_MAX:
            self._patience, self._has_lowered = PATIENCE_MIN, False
        if self._age < max(2, 4 - self.steps // 4):
            return
        usual = Prediction(step_s, median(self._costs), median(self._pauses))
        worst = Prediction(step_s, max(self._costs, default=0.0), max(self._pauses, default=0.0))
        if self._too_short is not None and worst.cost_s < self._too_short[0] / ALIKE:
            self._too_short = None
        waited = self._waited() if pipelined else usual.share(self.steps)
        self.is_bound = waited > share_max and self.steps == self.steps_max
        if waited > share_max:
            self._raise(usual, share_max, waited)
        else:
            self._lower(worst, share_max, may_try=pipelined and not waited)

    def _waited(self) -> float:
        """The share of the time spent waiting, without the worst cycle."""
        cycles = sorted(self._cycles, key=lambda cycle: cycle[1])[:-1]
        computed_s, waited_s = (sum(times) for times in zip(*cycles, strict=True))
        return waited_s / (waited_s + computed_s) if waited_s else 0.0

    # ------------------------------------------------------------ the rule

    def _raise(self, link: Prediction, share_max: float, waited: float) -> None:
        if self._has_lowered:
            self._patience = min(2 * self._patience, PATIENCE_MAX)
        self._has_lowered = False
        time_s = self.steps * link.step_s
        if time_s < ALIKE * link.cost_s:  # Else the waiting had another cause, such as a stall.
            self._too_short = (link.cost_s, time_s)
        wanted = max(self.steps + 1, link.smallest(share_max, self.steps_max))
        if wanted == self.steps + 1 and waited > 2 * share_max:
            wanted = 2 * self.steps  # The measurements do not explain it: a long round trip.
        self._change(min(wanted, GROWTH_MAX * self.steps, self.steps_max))

    def _lower(self, link: Prediction, share_max: float, *, may_try: bool) -> None:
        """Lower an interval. may_try: even below what is predicted to suffice."""
        careful = self.steps - max(1, self.steps // SHRINKING)
        wanted = link.smallest(SURE * share_max, self.steps_max)
        if self._too_short is not None and link.step_s:
            wanted = max(wanted, ceil(LONGER * self._too_short[1] / link.step_s))
        if wanted < self.steps and self._age >= self._patience:
            self._has_lowered = True
            self._change(wanted)
        elif may_try and self._too_short is None and self._age >= PROBES and careful >= 1:
            self._change(careful)

    def _change(self, steps: int) -> None:
        self.steps = steps
        self._cycles: deque[tuple[float, float]] = deque(maxlen=CYCLES_KEPT)
        self._age = 0


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
        self.intervals = {d: Interval(option) for d, option in side.automatic().items()}
        """"push" or "fetch" -> its interval in steps, where a method's option sets it."""
        self.computed_s = 0.0
        self._waited_s = {PUSH: 0.0, FETCH: 0.0}
        self._cycles = dict.fromkeys(self._waited_s, (0.0, 0.0, 0))
        """Seconds computed and waited, and bytes charged to the limit, when the current cycle of a
        direction began."""
        self._limit_s = dict.fromkeys(self._waited_s, 0.0)
        """How long the limit held back the bytes of the last cycle."""
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
        """Count a step that took this long."""
        self.computed_s += seconds
        self._recent_s.append(seconds)

    @property
    def waited_s(self) -> float:
        return sum(self._waited_s.values())

    def waits(self, direction: str, now: float) -> None:
        """The replica is idle because of this direction from now on; "": it is not idle."""
        if self._waits_for:
            self._waited_s[self._waits_for] += now - self._since
        self._waits_for, self._since = direction, now

    # ------------------------------------------------------------ pushes and fetches

    def pushed(self, number: int, now: float) -> None:
        """Note when a push was sent."""
        self.waits("", now)
        self._pushed_at[number] = now
        self._end_cycle(PUSH)

    def settled(self, number: int, now: float) -> None:
        """Count the time that a push took: all shards have settled it."""
        begun_at = max(self._pushed_at.pop(number), self._settled_at)
        self._settled_at = now
        self._took(PUSH, now - begun_at)

    def fetch_began(self, now: float, *, waits: bool) -> None:
        self._fetching_since, self._fetch_waits = now, waits
        self._end_cycle(FETCH)

    def fetched(self, now: float) -> None:
        """Count the time that a fetch took: all shards have answered. Idempotent."""
        if self._fetching_since is None:
            return
        took_s, self._fetching_since = now - self._fetching_since, None
        self._took(FETCH, *((0.0, took_s) if self._fetch_waits else (took_s, 0.0)))

    # ------------------------------------------------------------ the intervals

    def _end_cycle(self, direction: str) -> None:
        limiter = self.limiters[direction]
        ends = (self.computed_s, self._waited_s[direction], limiter.spent_bytes)
        began, self._cycles[direction] = self._cycles[direction], ends
        computed_s, waited_s, nbytes = (end - begin for end, begin in zip(ends, began, strict=True))
        self._limit_s[direction] = nbytes / (limiter.bytes_per_s or inf)
        if direction in self.intervals and computed_s:
            self.intervals[direction].ended(computed_s, waited_s)
            self._decide(direction)

    def _took(self, direction: str, cost_s: float, pause_s: float = 0.0) -> None:
        if direction in self.intervals:
            self.intervals[direction].took(max(cost_s, self._limit_s[direction]), pause_s)
            self._decide(direction)

    def _decide(self, direction: str) -> None:
        interval = self.intervals[direction]
        steps = getattr(self.side.options, interval.key)
        if steps != AUTO:
            interval.begin(steps)  # If it becomes "auto", it continues from this number.
        elif self._recent_s:
            share_max = interval.share_max / (2 if self._fetch_waits else 1)
            pipelined = direction == PUSH and not self._fetch_waits
            interval.decide(median(self._recent_s), share_max, pipelined=pipelined)
        self.side.intervals[interval.key] = interval.steps

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
            options, every = self.side.options, self.intervals.values()
            found["intervals"] = {each.key: self.side.interval(each.key) for each in every}
            bound = (each for each in every if each.is_bound and getattr(options, each.key) == AUTO)
            found["bound"] = {each.key: each.steps_max for each in bound}
        return found
