"""The cores of a machine in virtual time, and the threads that share them.

Threads that are ready wait in one queue. Whoever gets a core keeps it for a slice, unless nothing
is left for it to do: a thread that ends a piece of work and has another one goes on within its
slice, as on Linux. So on a machine with fewer cores than busy threads everything takes longer, and
an answer waits for the slices of others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dlctl.sim.timeline import Timeline

SLICE_S = 0.003
"""Of Linux's default scheduler, with a few threads for each core."""
EPSILON_S = 1e-9
Do = Callable[[], None]


@dataclass(slots=True)
class _Work:
    left_s: float
    """CPU time that it still needs."""
    sleeps_s: float
    do: Do
    """Called when it is done, while its thread has the core."""


@dataclass(slots=True)
class _Turn:
    """A thread on a core, working on one piece."""

    work: _Work
    began: float
    slice_left_s: float
    """When it began."""
    takes_s: float
    """Until the next look: longer than its slice while nobody waits."""


class Cores:
    """Those of one machine."""

    def __init__(self, timeline: Timeline, count: int, slice_s: float = SLICE_S) -> None:
        self.timeline = timeline
        self.count = count
        self.slice_s = slice_s
        self.used_s = 0.0
        """CPU time of all threads so far."""
        self._ready: deque[SimThread] = deque()
        self._running: dict[SimThread, _Turn | None] = {}
        """Who has a core; None: between two pieces of work."""

    def wake(self, thread: SimThread) -> None:
        """It has something to do, and has no core."""
        self._queue(thread)
        if len(self._running) >= self.count:
            self._end_long_turns()
        self._fill()

    def _queue(self, thread: SimThread) -> None:
        thread.ready_at = self.timeline.now
        self._ready.append(thread)

    def _fill(self) -> None:
        while self._ready and len(self._running) < self.count:
            thread = self._ready.popleft()
            thread.waited_s += self.timeline.now - thread.ready_at
            self._running[thread] = None
            self._run(thread, self.slice_s)

    def _end_long_turns(self) -> None:
        """Somebody waits: whoever works on beyond its slice is looked at when that ends."""
        for thread, turn in self._running.items():
            if turn is not None and turn.takes_s > turn.slice_left_s + EPSILON_S:
                passed_s = self.timeline.now - turn.began
                self._account(thread, turn.work, passed_s)
                used_s = (passed_s - turn.slice_left_s) % self.slice_s
                is_first = passed_s < turn.slice_left_s
                left_s = turn.slice_left_s - passed_s if is_first else self.slice_s - used_s
                self._begin(thread, turn.work, left_s, min(left_s, turn.work.left_s))

    def _account(self, thread: SimThread, work: _Work, cpu_s: float) -> None:
        work.left_s -= cpu_s
        self.used_s += cpu_s
        thread.used_s += cpu_s

    def _run(self, thread: SimThread, slice_left_s: float) -> None:
        """Let a thread that has a core go on with what it has to do."""
        while thread.queue and thread.queue[0].left_s <= EPSILON_S and thread.is_alive():
            work = thread.queue.popleft()
            if work.sleeps_s:
                self._sleep(thread, work)
                break
            work.do()
        if not thread.queue or thread.sleeps or not thread.is_alive():
            thread.is_awake = False
            self._release(thread)
            return
        if slice_left_s <= EPSILON_S:
            if self._ready:
                self._queue(thread)
                self._release(thread)
                return
            slice_left_s = self.slice_s
        work = thread.queue[0]
        is_waited_for = bool(self._ready)
        takes_s = min(work.left_s, slice_left_s) if is_waited_for else work.left_s
        self._begin(thread, work, slice_left_s, takes_s)

    def _begin(self, thread: SimThread, work: _Work, slice_left_s: float, takes_s: float) -> None:
        turn = _Turn(work, self.timeline.now, slice_left_s, takes_s)
        self._running[thread] = turn

        def end() -> None:
            if self._running.get(thread) is turn:
                self._running[thread] = None
                self._account(thread, work, takes_s)
                over_s = (takes_s - slice_left_s) % self.slice_s
                is_within = takes_s <= slice_left_s
                self._run(thread, slice_left_s - takes_s if is_within else self.slice_s - over_s)

        self.timeline.after(takes_s, end)

    def _release(self, thread: SimThread) -> None:
        self._running.pop(thread, None)
        self._fill()

    def _sleep(self, thread: SimThread, work: _Work) -> None:
        """It waits for something that needs no core; what is queued behind it waits as well."""
        thread.sleeps = True

        def wake() -> None:
            thread.sleeps = False
            thread.queue.appendleft(_Work(0.0, 0.0, work.do))
            thread.wake()

        self.timeline.after(work.sleeps_s, wake)


class SimThread:
    """One thread of a process: its work is done in order."""

    def __init__(
        self, cores: Callable[[], Cores], is_alive: Callable[[], bool], wake_s: float = 0.0
    ) -> None:
        """cores: of its machine; asked when it has something to do. wake_s: how long it takes from
        then on until it stands in the queue.
        """
        self._cores = cores
        self.is_alive = is_alive
        self._wake_s = wake_s
        self.queue: deque[_Work] = deque()
        self.is_awake = False
        """It has a core, or waits for one."""
        self.sleeps = False
        self.used_s = 0.0
        """CPU time so far."""
        self.ready_at = 0.0
        self.waited_s = 0.0
        """How long it was ready and had no core."""
        self.wakes = 0

    @property
    def is_idle(self) -> bool:
        return not self.is_awake and not self.sleeps

    def run(self, cpu_s: float, do: Do, *, sleeps_s: float = 0.0, next_up: bool = False) -> None:
        """Call `do` after this CPU time, and then some time without a core. next_up: before what is
        queued already: it belongs to the work that has just ended.
        """
        work = _Work(cpu_s, sleeps_s, do)
        if next_up:
            self.queue.appendleft(work)
        else:
            self.queue.append(work)
        self.wake()

    def wake(self) -> None:
        if self.is_idle and self.queue:
            self.is_awake = True
            self.wakes += 1
            cores = self._cores()
            if self._wake_s:
                cores.timeline.after(self._wake_s, lambda: cores.wake(self))
            else:
                cores.wake(self)
