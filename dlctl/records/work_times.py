"""How long the pieces of a worker's work took: counts, sums, and a histogram by powers of two.

A file `times/<worker>.<incarnation>.json` of the run directory has them for each kind of work, with
how long the threads of the worker were ready and waited for a core.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

FOLDER = "times"
SCHEMA = "dlctl.times/1"
BUCKET_S = 1e-6
"""Bucket k of a histogram has durations of 2^(k-1) to 2^k of this."""
BUCKETS_MAX = 48
Json = dict[str, Any]


@dataclass(slots=True)
class WorkTimes:
    """Of one kind of work: a step, an evaluation, the building of the model ..."""

    count: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Of the whole process while it worked, all threads together."""
    histogram: list[int] = field(default_factory=list)
    """Bucket -> how many, by wall time."""

    def add(self, wall_s: float, cpu_s: float, count: int = 1) -> None:
        """count: pieces of work that took this together."""
        self.count += count
        self.wall_s += wall_s
        self.cpu_s += cpu_s
        each = max(wall_s / count, BUCKET_S)
        bucket = min(BUCKETS_MAX, math.frexp(each / BUCKET_S)[1])
        self.histogram.extend([0] * (bucket + 1 - len(self.histogram)))
        self.histogram[bucket] += count

    @property
    def mean_s(self) -> float:
        return self.wall_s / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Seconds, interpolated within a bucket on a logarithmic scale. 0 without any work."""
        wanted, below = share * self.count, 0
        for bucket, count in enumerate(self.histogram):
            if count and below + count >= wanted:
                within = (wanted - below) / count
                return float(BUCKET_S * 2 ** (bucket - 1 + within))
            below += count
        return 0.0

    def to_json(self) -> Json:
        return {
            "count": self.count,
            "wall_s": round(self.wall_s, 6),
            "cpu_s": round(self.cpu_s, 6),
            "histogram": self.histogram,
        }

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> WorkTimes:
        """Raises KeyError, TypeError or ValueError for what `to_json` has not written."""
        histogram = [int(count) for count in values["histogram"]]
        return cls(int(values["count"]), float(values["wall_s"]), float(values["cpu_s"]), histogram)

    @classmethod
    def together(cls, parts: Iterable[WorkTimes]) -> WorkTimes:
        """All of them as one."""
        whole = cls()
        for part in parts:
            whole.count += part.count
            whole.wall_s += part.wall_s
            whole.cpu_s += part.cpu_s
            whole.histogram.extend([0] * (len(part.histogram) - len(whole.histogram)))
            for bucket, count in enumerate(part.histogram):
                whole.histogram[bucket] += count
        return whole
