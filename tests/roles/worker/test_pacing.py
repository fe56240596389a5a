"""Intervals that are "auto", over a link in virtual time: stable, quick, small, within bounds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from builders import replica
from example_counts import times
from hypothesis import given
from hypothesis import strategies as st

from dlctl.algorithms.base import Automatic
from dlctl.algorithms.methods.downpour import DOWNPOUR
from dlctl.roles.worker.pacing import PUSH, Interval, Pacing
from dlctl.roles.worker.send_queue import Limiter
from dlctl.roles.worker.shard_client import WINDOW

STEP_S = 0.01
SHARE_MAX = 0.1
KEY = "push_every_steps"
Seconds = Callable[[float], float]


class Link:
    """One push after the other, each of `push_s(now)`; then the way to and fro."""

    def __init__(self, push_s: float | Seconds, *, way_s: float = 0.0, jitter: float = 0.0) -> None:
        self.push_s: Seconds = push_s if callable(push_s) else lambda now: push_s
        self.way_s = way_s
        self.jitter = jitter
        self.free_at = 0.0
        self.rng = np.random.default_rng(1)
        self._queue: deque[tuple[int, float]] = deque()
        self._answers: dict[int, float] = {}

    def push(self, leaves_at: float) -> int:
        """The number of a push."""
        number = len(self._queue) + len(self._answers)
        self._queue.append((number, leaves_at))
        return number

    def answered(self, number: int, by: float = math.inf) -> float:
        """When the answer comes; if not by then, that is all that is said."""
        while number not in self._answers and max(self.free_at, self._queue[0][1]) <= by:
            first, leaves_at = self._queue.popleft()
            self.free_at = max(self.free_at, leaves_at)
            factor = float(np.exp(self.jitter * self.rng.standard_normal()))
            self.free_at += factor * self.push_s(self.free_at)
            self._answers[first] = self.free_at + self.way_s
        return self._answers.get(number, math.inf)


class Worker:
    """A replica that computes and pushes, with the window of pushes that a real one has."""

    def __init__(
        self,
        link: Link,
        *,
        every: int | str = "auto",
        steps_max: int = 64,
        spread: float = 0.0,
        seed: int = 0,
    ) -> None:
        options = DOWNPOUR.Options(push_every_steps=every, auto_steps_max=steps_max)
        self.side = replica(DOWNPOUR, np.zeros(1, np.float32), options)
        self.limiters = {"push": Limiter(), "fetch": Limiter()}
        self.pacing = Pacing(self.side, self.limiters)
        self.link = link
        self.spread = spread
        self.rng = np.random.default_rng([seed, 2])
        self.now = 0.0
        self.intervals: list[int] = []
        """After each step."""
        self._under_way: deque[int] = deque()
        self._since = 10**9

    def step(self) -> None:
        took_s = STEP_S * float(np.exp(self.spread * self.rng.standard_normal()))
        self.now += took_s
        while self._under_way and self.link.answered(self._under_way[0], self.now) <= self.now:
            self._settle()
        self.pacing.computed(took_s)
        self._since += 1
        if self._since >= self.side.interval(KEY):
            self._push()
        self.intervals.append(self.side.interval(KEY))

    def _settle(self) -> float:
        """When it was."""
        number = self._under_way.popleft()
        at = self.link.answered(number)
        self.pacing.settled(number, at)
        return at

    def _push(self) -> None:
        if len(self._under_way) == WINDOW:
            self.pacing.waits(PUSH, self.now)
            self.now = self._settle()
        limiter = self.limiters["push"]
        number = self.link.push(max(self.now, limiter.free_at))
        limiter.spend(400, self.now)
        self._under_way.append(number)
        self.pacing.pushed(number, self.now)
        self._since = 0

    def limit(self, bytes_per_s: float | None) -> None:
        self.limiters["push"].spend(0, self.now)
        self.limiters["push"].bytes_per_s = bytes_per_s

    def run(self, steps: int) -> float:
        """So many steps; the share of their time that was waited."""
        computed_s, waited_s = self.pacing.computed_s, self.pacing.waited_s
        for _ in range(steps):
            self.step()
        computed_s, waited_s = self.pacing.computed_s - computed_s, self.pacing.waited_s - waited_s
        return waited_s / (computed_s + waited_s)

    def changes(self, steps: int) -> int:
        """Of the interval, in the newest steps."""
        newest = self.intervals[-steps:]
        return sum(a != b for a, b in pairwise(newest))


def test_over_a_fast_link_every_step_is_pushed() -> None:
    worker = Worker(Link(0.5 * STEP_S))
    assert worker.run(1000) == 0.0
    assert set(worker.intervals) == {1}


@pytest.mark.parametrize("steps_a_push", [1.3, 2.5, 10.0, 33.0, 60.0])
def test_over_a_slow_link_it_is_the_smallest_interval_that_keeps_the_share(
    steps_a_push: float,
) -> None:
    link = steps_a_push * STEP_S
    worker = Worker(Link(link))
    worker.run(300)
    assert worker.run(1000) <= SHARE_MAX + 1e-3
    assert worker.changes(1000) == 0
    found = worker.intervals[-1]
    shorter = Worker(Link(link), every=found - 1)
    shorter.run(50 * found)  # Its pushes queue up before it waits for them.
    assert shorter.run(50 * found) > SHARE_MAX


def test_it_is_found_within_a_few_tens_of_steps() -> None:
    worker = Worker(Link(20 * STEP_S))
    worker.run(60)
    assert 18 <= worker.intervals[-1] <= 20


def test_it_follows_a_link_that_becomes_slower_and_faster() -> None:
    speed = {"push_s": 2.5 * STEP_S}
    worker = Worker(Link(lambda now: speed["push_s"]), spread=0.2)
    worker.run(300)
    assert 2 <= worker.intervals[-1] <= 4

    speed["push_s"] = 20 * STEP_S
    worker.run(80)
    assert 17 <= worker.intervals[-1] <= 24
    assert worker.run(500) < 1.2 * SHARE_MAX

    speed["push_s"] = 0.5 * STEP_S
    worker.run(80)
    assert worker.intervals[-1] == 1, "three pushes are enough to see it"


@pytest.mark.parametrize("seed", range(3))
def test_jitter_of_the_link_and_of_the_steps_does_not_make_it_swing(seed: int) -> None:
    worker = Worker(Link(10.4 * STEP_S, jitter=0.3), spread=0.3, seed=seed)
    worker.run(500)
    share = worker.run(3000)
    assert share < 1.2 * SHARE_MAX
    newest = worker.intervals[-3000:]
    assert (min(newest) >= 6, max(newest) <= 14) == (True, True), (min(newest), max(newest))
    assert worker.changes(3000) <= 30


@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_bursts_of_other_traffic_do_not_make_it_swing(jitter: float) -> None:
    """For half a second the link is ten times slower, for the next one it is not."""
    link = Link(lambda now: (2 if int(now / 0.5) % 2 else 20) * STEP_S, jitter=jitter)
    worker = Worker(link, spread=jitter)
    worker.run(500)
    assert worker.run(3000) < 1.2 * SHARE_MAX
    assert worker.changes(3000) <= 60


def test_a_burst_now_and_then_is_forgotten_as_soon_as_the_first_one() -> None:
    """For one second in ten the link is ten times slower, again and again."""
    worker = Worker(Link(lambda now: (20 if now % 10.0 < 1.0 else 2) * STEP_S))
    worker.run(5000)
    worker.run(5000)
    assert np.mean(worker.intervals[-5000:]) < 4


def test_a_stall_of_half_a_minute_is_no_slow_link() -> None:
    worker = Worker(Link(5 * STEP_S), spread=0.2)
    worker.run(300)
    before = worker.intervals[-1]
    worker.link.free_at = worker.now + 30.0
    worker.run(200)
    assert max(worker.intervals) <= 4 * before, "one stall may stretch it once, and not to the end"
    worker.run(300)
    assert abs(worker.intervals[-1] - before) <= 1


def test_several_stalls_make_it_longer_and_it_comes_back_from_the_bound() -> None:
    worker = Worker(Link(2 * STEP_S), steps_max=32)
    worker.run(300)
    before = worker.intervals[-1]
    for _ in range(12):
        worker.link.free_at = worker.now + 5.0
        worker.run(20)
    assert max(worker.intervals) > before
    worker.run(1500)
    assert abs(worker.intervals[-1] - before) <= 1


def test_the_bounds_hold_however_slow_the_link_is() -> None:
    worker = Worker(Link(1000 * STEP_S), steps_max=12)
    worker.run(200)
    assert worker.intervals[-1] == max(worker.intervals) == 12
    assert min(worker.intervals) == 1


def test_a_bound_is_told_for_as_long_as_it_is_too_low_for_the_link() -> None:
    worker = Worker(Link(lambda now: 30 * STEP_S if now < 60.0 else 2 * STEP_S), steps_max=12)
    worker.run(200)
    assert worker.pacing.metrics(worker.now)["bound"] == {KEY: 12}
    worker.side.options.push_every_steps = 12
    assert worker.pacing.metrics(worker.now)["bound"] == {}, "somebody has chosen it"
    worker.side.options.push_every_steps = "auto"
    worker.run(5000)
    assert worker.now > 60.0
    assert worker.pacing.metrics(worker.now)["bound"] == {}
    enough = Worker(Link(10 * STEP_S), steps_max=12)
    enough.run(500)
    assert enough.pacing.metrics(enough.now)["bound"] == {}


def test_a_limit_is_obeyed_as_soon_as_it_changes() -> None:
    worker = Worker(Link(0.1 * STEP_S))
    worker.limit(400 / (8 * STEP_S))
    worker.run(100)
    assert 7 <= worker.intervals[-1] <= 9
    assert worker.run(500) < SHARE_MAX

    worker.limit(400 / (32 * STEP_S))
    worker.run(80)
    assert 29 <= worker.intervals[-1] <= 36

    worker.limit(None)
    worker.run(250)
    assert worker.intervals[-1] == 1


def test_a_long_way_to_and_fro_is_no_reason_to_push_less_while_the_window_has_room() -> None:
    worker = Worker(Link(0.1 * STEP_S, way_s=3.5 * STEP_S))
    assert worker.run(500) < 0.01
    assert worker.intervals[-1] == 1


def test_what_became_too_long_on_a_long_way_is_found_by_trying() -> None:
    """There, the time of a push says nothing of how many of them the link can take."""
    speed = {"push_s": 10 * STEP_S}
    worker = Worker(Link(lambda now: speed["push_s"], way_s=3.5 * STEP_S))
    worker.run(200)
    assert worker.intervals[-1] >= 9
    speed["push_s"] = 0.1 * STEP_S
    worker.run(400)
    assert worker.intervals[-1] == 1


@pytest.mark.parametrize("workers", [4, 8])
def test_workers_on_one_link_find_intervals_that_keep_the_share_of_each(workers: int) -> None:
    """The link is faster for one as soon as the others push less: they must not chase that."""
    link = Link(3 * STEP_S)
    crowd = [Worker(link, spread=0.2, seed=seed) for seed in range(workers)]

    def run_until(seconds: float) -> None:
        while (worker := min(crowd, key=lambda w: w.now)).now < seconds:
            worker.step()

    run_until(20.0)
    before = [(w.pacing.computed_s, w.pacing.waited_s) for w in crowd]
    run_until(60.0)
    for worker, (computed_s, waited_s) in zip(crowd, before, strict=True):
        waited_s, computed_s = (
            worker.pacing.waited_s - waited_s,
            worker.pacing.computed_s - computed_s,
        )
        assert waited_s / (waited_s + computed_s) < 1.2 * SHARE_MAX
        assert worker.intervals[-1] <= 2 * 3 * workers, "and it is not far longer than needed"


def test_what_becomes_automatic_goes_on_from_the_number_that_it_was() -> None:
    worker = Worker(Link(10 * STEP_S), every=6)
    worker.run(50)
    assert set(worker.intervals) == {6}
    worker.side.options.push_every_steps = "auto"
    worker.run(2)
    assert worker.intervals[-1] == 6
    worker.run(200)
    assert 9 <= worker.intervals[-1] <= 10
    worker.side.options.push_every_steps = 3
    worker.run(5)
    assert worker.intervals[-1] == 3


def test_a_number_beyond_the_bound_holds_until_it_becomes_automatic() -> None:
    worker = Worker(Link(0.1 * STEP_S), every=100, steps_max=16)
    worker.run(5)
    assert worker.intervals[-1] == 100
    worker.side.options.push_every_steps = "auto"
    worker.run(1)
    assert worker.intervals[-1] <= 16


def test_the_same_measurements_give_the_same_intervals() -> None:
    def run() -> list[int]:
        worker = Worker(Link(7.7 * STEP_S, jitter=0.5), spread=0.5)
        worker.run(1000)
        return worker.intervals

    assert run() == run()


SECONDS = st.sampled_from([0.0, 1e-9, 0.01, 0.1, 30.0, 1e9])


@times(2)
@given(
    st.integers(1, 70),
    st.booleans(),
    st.lists(
        st.tuples(SECONDS, SECONDS, SECONDS, SECONDS),
        max_size=60,
    ),
)
def test_whatever_is_measured_it_stays_within_its_bounds(
    steps_max: int,
    pipelined: bool,
    story: list[tuple[float, float, float, float]],
) -> None:
    pace = Interval(Automatic(KEY, steps_max, SHARE_MAX))
    for step_s, waited_s, cost_s, pause_s in story:
        pace.took(cost_s, pause_s)
        pace.ended(pace.steps * step_s, waited_s)
        pace.decide(step_s, SHARE_MAX, pipelined=pipelined)
        assert 1 <= pace.steps <= steps_max
