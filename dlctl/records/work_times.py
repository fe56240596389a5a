"""Where the time of a daemon goes: counts, sums, and a histogram of durations.

A file `times/<daemon>.<incarnation>.json` of the run directory has what its loop handled, by the
kind of event and, of a worker, how long each kind of work of its compute thread took. From the
begin of its loop on, it has how long the threads were ready and waited for a core, and the CPU time
of the daemon and of all programs on its cores.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

FOLDER = "times"
SUM = "sum"
"""Kind of work: a sum of a group of replicas. Its wall time has the wait for the other members."""
SCHEMA = "dlctl.times/3"
BUCKET_S = 1e-6
PER_OCTAVE = 16
"""Bucket k of a histogram has durations of 2^((k-1)/16) to 2^(k/16) of BUCKET_S: 4 % more. In a
barrier the longest of all workers' steps counts, so that the spread matters as much as the mean."""
BUCKETS_MAX = 48 * PER_OCTAVE
Json = dict[str, Any]


def upper_s(bucket: float) -> float:
    """The longest duration of a bucket; with a fraction, one within the next bucket."""
    return BUCKET_S * math.exp2(bucket / PER_OCTAVE)


@dataclass(slots=True)
class WorkTimes:
    """Of one kind of work: a step, an evaluation, the building of the model ..."""

    count: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Of the thread that worked."""
    waited_s: float = 0.0
    """How long that thread was ready meanwhile, and had no core."""
    histogram: list[int] = field(default_factory=list)
    """Bucket -> how many, by wall time less what it waited."""

    def add(self, wall_s: float, cpu_s: float, count: int = 1, waited_s: float = 0.0) -> None:
        """count: pieces of work that took this together."""
        self.count += count
        self.wall_s += wall_s
        self.cpu_s += cpu_s
        self.waited_s += waited_s
        each = max((wall_s - waited_s) / count, BUCKET_S)
        bucket = min(BUCKETS_MAX, math.ceil(PER_OCTAVE * math.log2(each / BUCKET_S)))
        self.histogram.extend([0] * (bucket + 1 - len(self.histogram)))
        self.histogram[bucket] += count

    @property
    def mean_s(self) -> float:
        return self.wall_s / self.count if self.count else 0.0

    @property
    def core_share(self) -> float:
        """Of the time that it would take alone, the part for which it needs a core; the rest it
        waits for a device, a disk or another thread.
        """
        alone_s = self.wall_s - self.waited_s
        return min(1.0, self.cpu_s / alone_s) if alone_s > 0 else 1.0

    @property
    def alone_s(self) -> float:
        """The mean, less what it waited for a core."""
        return max(0.0, self.wall_s - self.waited_s) / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Seconds, interpolated within a bucket on a logarithmic scale. 0 without any work."""
        wanted, below = share * self.count, 0
        for bucket, count in enumerate(self.histogram):
            if count and below + count >= wanted:
                within = (wanted - below) / count
                return upper_s(bucket - 1 + within)
            below += count
        return 0.0

    def to_json(self) -> Json:
        return {
            "count": self.count,
            "wall_s": round(self.wall_s, 6),
            "cpu_s": round(self.cpu_s, 6),
            "waited_s": round(self.waited_s, 6),
            "histogram": self.histogram,
        }

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> WorkTimes:
        """Raises KeyError, TypeError or ValueError for what `to_json` has not written."""
        return cls(
            int(values["count"]),
            float(values["wall_s"]),
            float(values["cpu_s"]),
            float(values["waited_s"]),
            [int(count) for count in values["histogram"]],
        )

    @classmethod
    def together(cls, parts: Iterable[WorkTimes]) -> WorkTimes:
        """All of them as one."""
        whole = cls()
        for part in parts:
            whole.count += part.count
            whole.wall_s += part.wall_s
            whole.cpu_s += part.cpu_s
            whole.waited_s += part.waited_s
            whole.histogram.extend([0] * (len(part.histogram) - len(whole.histogram)))
            for bucket, count in enumerate(part.histogram):
                whole.histogram[bucket] += count
        return whole


@dataclass(slots=True)
class HandledTimes:
    """Of one kind of event: what the role did with it, and what that effected."""

    count: int = 0
    cpu_s: float = 0.0
    nbytes: int = 0
    """Of the arrays in the messages."""

    def to_json(self) -> Json:
        return {"count": self.count, "cpu_s": round(self.cpu_s, 6), "nbytes": self.nbytes}

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> HandledTimes:
        """Raises KeyError, TypeError or ValueError for what `to_json` has not written."""
        return cls(int(values["count"]), float(values["cpu_s"]), int(values["nbytes"]))

    def plus(self, other: HandledTimes) -> HandledTimes:
        return HandledTimes(
            self.count + other.count, self.cpu_s + other.cpu_s, self.nbytes + other.nbytes
        )


@dataclass(slots=True)
class LoopTimes:
    """What the loop of a daemon did."""

    handled: dict[str, HandledTimes] = field(default_factory=dict)
    """Kind of event (`wire/kinds.py`) -> its times."""
    cpu_s: float = 0.0
    """Of the loop's thread, from its first event."""
    elsewhere_s: float = 0.0
    """CPU time of `handled` in other threads."""
    transport_s: float = 0.0
    """CPU time of the threads that move messages."""

    @property
    def around_s(self) -> float:
        """CPU time for each event beside its handling: waiting, reading, decoding, sending."""
        handled_s = sum(times.cpu_s for times in self.handled.values())
        count = sum(times.count for times in self.handled.values())
        beside_s = self.cpu_s - (handled_s - self.elsewhere_s) + self.transport_s
        return max(0.0, beside_s) / count if count else 0.0

    def to_json(self) -> Json:
        return {
            "cpu_s": round(self.cpu_s, 6),
            "elsewhere_s": round(self.elsewhere_s, 6),
            "transport_s": round(self.transport_s, 6),
            "handled": {kind: times.to_json() for kind, times in self.handled.copy().items()},
        }

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> LoopTimes:
        """Raises KeyError, TypeError or ValueError for what `to_json` has not written."""
        return cls(
            {str(kind): HandledTimes.of_json(row) for kind, row in values["handled"].items()},
            float(values["cpu_s"]),
            float(values["elsewhere_s"]),
            float(values["transport_s"]),
        )

    @classmethod
    def together(cls, parts: Iterable[LoopTimes]) -> LoopTimes:
        """All of them as one."""
        whole = cls()
        for part in parts:
            whole.cpu_s += part.cpu_s
            whole.elsewhere_s += part.elsewhere_s
            whole.transport_s += part.transport_s
            for kind, times in part.handled.items():
                whole.handled[kind] = whole.handled.get(kind, HandledTimes()).plus(times)
        return whole
