"""Looks at a job's ack files every 20 ms: who goes on, who pauses, for how long.

The files are read by a thread of the harness, so what is seen here needs no word from any daemon.
Times are those of this process's monotonic clock.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from dlctl.errors import DlctlError
from dlctl.runs import acks

SAMPLE_S = 0.02
Who = tuple[int, int]
"""(slot, incarnation)."""
Counts = dict[Who, tuple[int, ...]]


class Watch:
    def __init__(self) -> None:
        self._directory: Path | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._changes: list[tuple[float, Who, tuple[int, ...]]] = []
        """(when it was seen, who, pushes settled by shard), oldest first."""
        self._newest: Counts = {}

    def begin(self, directory: Path) -> None:
        self._directory = directory
        self._thread = threading.Thread(target=self._look_on, name="watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _look_on(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._look()

    def _look(self) -> None:
        assert self._directory is not None
        try:
            records = acks.read_all(self._directory)
        except DlctlError:
            return
        now = time.monotonic()
        for record in records:
            who = (record.slot, record.incarnation)
            if self._newest.get(who) != record.counts:
                self._changes.append((now, who, record.counts))
                self._newest[who] = record.counts

    # ------------------------------------------------------------ questions

    def now(self) -> Counts:
        return dict(self._newest)

    def grown(self, slot: int, since: Counts) -> int:
        """Pushes of this slot that all shards have settled since then; 0 if one shard has none."""
        shards = zip(*self._of(self._newest, slot), strict=True)
        before = [sum(counts) for counts in zip(*self._of(since, slot), strict=True)]
        after = [sum(counts) for counts in shards]
        return min(
            (a - b for a, b in zip(after, before or [0] * len(after), strict=True)), default=0
        )

    def _of(self, counts: Counts, slot: int) -> list[tuple[int, ...]]:
        return [values for who, values in counts.items() if who[0] == slot]

    def first_push(self, slot: int, incarnation: int) -> bool:
        """Whether this incarnation has had a push settled by every shard."""
        return min(self._newest.get((slot, incarnation), (0,))) > 0

    def shard_grown(self, shard: int, since: Counts) -> bool:
        """Whether anybody has had a push settled by this shard since then."""
        return any(
            counts[shard] > since.get(who, counts)[shard] or who not in since
            for who, counts in self.now().items()
        )

    def longest_gap_s(self, slots: Iterable[int], since: float, until: float) -> float:
        """The longest time without news from one of these slots, each for itself."""
        times: defaultdict[int, list[float]] = defaultdict(list)
        for at, (slot, _), _ in self._changes:
            times[slot].append(at)
        return max((_longest(times[slot], since, until) for slot in slots), default=0.0)

    def longest_shard_gap_s(self, shard: int, since: float, until: float) -> float:
        """The longest time in which nobody at all had a push settled by this shard."""
        times: list[float] = []
        seen: dict[Who, int] = {}
        for at, who, counts in self._changes:
            if counts[shard] > seen.get(who, 0):
                seen[who] = counts[shard]
                times.append(at)
        return _longest(times, since, until)


def _longest(times: list[float], since: float, until: float) -> float:
    """The longest part of [since, until] without one of these times; the last one before counts."""
    before = max((t for t in times if t <= since), default=since)
    marks = [before, *(t for t in times if since < t <= until), max(until, since)]
    return max(b - a for a, b in itertools.pairwise(marks))
