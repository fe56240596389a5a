"""How many steps there are from one push, or one fetch, to the next, if that is to be "auto".

Wanted is the smallest number n for which a worker stands still for at most a given share of its
time: everything between two pushes or fetches makes gradients staler. With c seconds of computing
in a step, a link that can take one push every b seconds, and r seconds that are waited for a fetch
however rare it is (none where computing goes on meanwhile), a worker stands still in n steps for

    pause(n) = r + max(0, b - n c)          share(n) = pause(n) / (n c + pause(n))

c and r are measured as they are. b is the larger of what a limit says (bytes / rate) and the time
to the answer, divided by the number of pushes that were under way then (Little's law). The second
is exact as soon as pushes queue up for each other. Before that it may be too long, where most of it
is a way to and fro on which there is room for more of them; or too short, where others push over
the same link as soon as this worker does. So pushes get another interval

- that is longer, when more than the share was waited, over the last ones without the worst of them
  (one stall is no slow link): at once the n that keeps the share, at most four times as long;
- that is shorter, when half of the share is predicted for it, so that noise does not turn it back,
  and it was not found too short at about this b before. A lowering that has to be taken back costs
  trust: the next waits twice as long and goes an eighth down at most, until one has proved itself.
  Where nothing was waited and nothing was found too short, an eighth less is tried now and then.

Fetches are one at a time: what was measured says all, and share(n) stands for what was waited. A
fetch that nobody waits for has its time as b: the next one is due when it has come. If the method
waits for its fetches, they also wait for the pushes before them, and the same goes for pushes.

The rule is ours. The known one for the interval of local updates, AdaComm (Wang and Joshi, SysML
2019), goes by the loss and not by the link. b is measured much as the bottleneck is in BBR
(Cardwell et al., ACM Queue 2016); the growing patience is that of binary exponential backoff.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from math import ceil

from dlctl.roles.meters import median

CYCLES_KEPT = 16
COSTS_KEPT = 3
"""Of their median: one odd value is not enough to change anything, two are."""
GROWTH_MAX = 4
SHRINKING = 8
"""A careful step down is the 8th part."""
SURE = 0.5
"""Of the share, which a lower interval must keep."""
PATIENCE, PATIENCE_MAX = 2, 32
"""Cycles before the interval is lowered."""
PROBES = 8
"""Times the patience, before a lower one is tried without a reason."""
PROVEN = 32
"""Cycles after which a lower interval is right: a slight excess fills the window of pushes only
slowly."""
ALIKE = 1.25
"""A cost that is lower by more is of another link."""
LONGER = 1.1
"""Than the time of an interval that was too short, must be that of one that is not."""


@dataclass(slots=True)
class Cycle:
    """From one push (or fetch) to the next."""

    computed_s: float = 0.0
    waited_s: float = 0.0
    """Standing still for this direction."""
    nbytes: int = 0
    """What a limit was charged for."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    step_s: float
    """Of computing."""
    bytes_per_s: float | None
    """The limit, if there is one."""
    share_max: float
    """Of the time, that may be waited."""
    pipelined: bool
    """Several may be under way at once, so that the time of one says less than the waiting."""


class Pace:
    """The interval of one direction: `steps`, from 1 to `steps_max`. It begins with 1."""

    def __init__(self, steps_max: int) -> None:
        self.steps = 1
        self.steps_max = steps_max
        self._forget()

    def begin(self, steps: int) -> None:
        """Go on from an interval that somebody has chosen."""
        self._forget()
        self.steps = min(steps, self.steps_max)

    def _forget(self) -> None:
        self._costs: deque[float] = deque(maxlen=COSTS_KEPT)
        self._pauses: deque[float] = deque(maxlen=COSTS_KEPT)
        self._rate: float | None = None
        self._change(self.steps)
        self._trust()

    def _trust(self) -> None:
        self._patience = PATIENCE
        self._lowered = False
        """It may still turn out that the last lowering was wrong."""
        self._too_short: tuple[float, float] | None = None
        """(cost, time) of the longest interval that was found too short, in seconds."""

    # ------------------------------------------------------------ what was measured

    def took(self, cost_s: float, pause_s: float = 0.0) -> None:
        """What one push or fetch has cost: its time, divided by how many were under way. pause_s:
        the time that was waited for it whatever the interval; it is no cost then.
        """
        self._costs.append(cost_s)
        self._pauses.append(pause_s)

    def ended(self, cycle: Cycle) -> None:
        """An interval is over."""
        self._cycles.append(cycle)
        self._age += 1

    def decide(self, now: Circumstances) -> None:
        """Change `steps`, if what was measured since the last change asks for it."""
        if now.bytes_per_s != self._rate:
            self._rate = now.bytes_per_s
            self._trust()
        if self._age < max(2, 4 - self.steps // 4):
            return
        if self._age >= PROVEN and self._lowered:
            self._trust()
        if self._too_short is not None and self._cost_s(now) < self._too_short[0] / ALIKE:
            self._too_short = None
        waited = self._waited() if now.pipelined else self._share(self.steps, now)
        if waited > now.share_max:
            self._raise(now)
        else:
            self._lower(now, never_waited=waited == 0.0)

    # ------------------------------------------------------------ the prediction

    def _limit_s(self, now: Circumstances) -> float:
        if now.bytes_per_s is None:
            return 0.0
        return median(c.nbytes for c in self._cycles) / now.bytes_per_s

    def _cost_s(self, now: Circumstances) -> float:
        """b of the docstring above."""
        return max(self._limit_s(now), median(self._costs))

    def _always_s(self, now: Circumstances) -> float:
        """r of the docstring above: what is waited beyond what the limit explains."""
        explained_s = max(0.0, self._limit_s(now) - self.steps * now.step_s)
        return max(0.0, median(self._pauses) - explained_s)

    def _share(self, steps: int, now: Circumstances) -> float:
        computed_s = steps * now.step_s
        pause_s = self._always_s(now) + max(0.0, self._cost_s(now) - computed_s)
        return pause_s / (computed_s + pause_s) if pause_s else 0.0

    def _smallest(self, now: Circumstances, share: float) -> int:
        """The smallest interval that keeps the share; the largest there is, if none does."""
        found = bisect_left(
            range(1, self.steps_max), True, key=lambda n: self._share(n, now) <= share
        )
        return 1 + found

    def _waited(self) -> float:
        """The share of the time that was waited, without the worst cycle."""
        cycles = sorted(self._cycles, key=lambda c: c.waited_s)[:-1]
        waited_s = sum(c.waited_s for c in cycles)
        return waited_s / (waited_s + sum(c.computed_s for c in cycles)) if waited_s else 0.0

    # ------------------------------------------------------------ the rule

    def _raise(self, now: Circumstances) -> None:
        if self._lowered:
            self._patience = min(2 * self._patience, PATIENCE_MAX)
            self._lowered = False
        self._too_short = (self._cost_s(now), self.steps * now.step_s)
        wanted = max(self.steps + 1, self._smallest(now, now.share_max))
        self._change(min(wanted, GROWTH_MAX * self.steps, self.steps_max))

    def _lower(self, now: Circumstances, *, never_waited: bool) -> None:
        careful = self.steps - max(1, self.steps // SHRINKING)
        wanted = self._smallest(now, SURE * now.share_max)
        if self._too_short is not None and now.step_s:
            wanted = max(wanted, ceil(LONGER * self._too_short[1] / now.step_s))
        if wanted < self.steps and self._age >= self._patience:
            trusted = self._patience == PATIENCE
            self._lowered = True
            self._change(wanted if trusted else max(wanted, careful))
        elif never_waited and self._may_try(careful, now):
            self._lowered = True
            self._change(careful)

    def _may_try(self, steps: int, now: Circumstances) -> bool:
        """Whether a lower interval may be right although the prediction says that it is not."""
        if not now.pipelined or steps < 1 or self._too_short is not None:
            return False
        is_time = self._age >= PROBES * self._patience
        return is_time and steps * now.step_s >= self._limit_s(now)

    def _change(self, steps: int) -> None:
        self.steps = steps
        self._cycles: deque[Cycle] = deque(maxlen=CYCLES_KEPT)
        self._age = 0
