"""Metrics of roles: rates, latency quantiles, a histogram of staleness."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping

from dlctl.roles.protocol.limits import METRICS_MAX

LATENCIES_KEPT = 512
RATE_S = 1.0
"""The window over which the rates of a daemon are measured."""
RATE_S_MIN = 0.5
"""The shortest time over which a rate is measured: over less it would be noise."""


def median(values: Iterable[float]) -> float:
    """The upper median of these values; 0 if there are none."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


def follow(means: dict[str, float], newest: Mapping[str, float], weight: float) -> None:
    """Update running means with the newest values, except those that would make a mean non-finite,
    and for at most `METRICS_MAX` names.
    """
    for name, value in newest.items():
        if name not in means and len(means) >= METRICS_MAX:
            continue
        before = means.get(name, value)
        mean = before + weight * (value - before)
        if math.isfinite(mean):
            means[name] = mean


class Latency:
    """Quantiles of the last 512 durations."""

    def __init__(self) -> None:
        self._recent_s: deque[float] = deque(maxlen=LATENCIES_KEPT)

    def add(self, seconds: float) -> None:
        self._recent_s.append(seconds)

    def quantiles_ms(self, prefix: str) -> dict[str, float]:
        """{prefix_ms_p50, prefix_ms_p99}; empty before the first duration."""
        if not self._recent_s:
            return {}
        ordered = sorted(self._recent_s)
        last = len(ordered) - 1
        return {
            f"{prefix}_ms_p50": round(ordered[last // 2] * 1e3, 3),
            f"{prefix}_ms_p99": round(ordered[math.ceil(last * 0.99)] * 1e3, 3),
        }


class Pace:
    """Growth per second of counters that grow in jumps, such as work counted by portions.

    It is measured from jump to jump, over about the last `window_s` seconds: a portion that takes
    longer than that is measured from the end of the previous one. None until there was a jump; zero
    after twice the measured time without a jump.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._jumps: deque[tuple[float, tuple[int, ...]]] = deque()

    def look(self, now: float, counts: tuple[int, ...]) -> tuple[float, ...] | None:
        """Add the current counters, first when the work begins; returns the rate of each."""
        jumps = self._jumps
        if not jumps or counts != jumps[-1][1]:
            jumps.append((now, counts))
        while len(jumps) > 2 and jumps[-1][0] - jumps[1][0] >= self._window_s:
            jumps.popleft()
        (since, before), (until, after) = jumps[0], jumps[-1]
        elapsed_s = until - since
        if elapsed_s < RATE_S_MIN:
            return None
        if now - until > 2 * max(elapsed_s, self._window_s):
            return tuple(0.0 for _ in counts)
        return tuple((b - a) / elapsed_s for a, b in zip(before, after, strict=True))


PEERS_MAX = 1000
"""Peers in a report: some 30 kB at most. One that cannot be sent is no heartbeat."""


class Rates:
    """Counters that only grow, reported with their growth per second (`Pace`)."""

    def __init__(self, *names: str) -> None:
        self.total = dict.fromkeys(names, 0)
        self.of_peers: dict[str, dict[str, int]] = {}
        """Peer -> name -> its part of the total, of the first `PEERS_MAX` that were told."""
        self._pace = Pace(RATE_S)

    def add(self, name: str, amount: int, peer: str = "") -> None:
        self.total[name] += amount
        if peer in self.of_peers or (peer and len(self.of_peers) < PEERS_MAX):
            of = self.of_peers.setdefault(peer, {})
            of[name] = of.get(name, 0) + amount

    def report(self, now: float) -> dict[str, float]:
        """{name: total, name_per_s: rate}. There is no rate for a total of 0."""
        found: dict[str, float] = {**self.total}
        rates = self._pace.look(now, tuple(self.total.values()))
        for (name, total), rate in zip(self.total.items(), rates or (), strict=False):
            if total:
                found[f"{name}_per_s"] = round(rate, 3)
        return found


class Staleness:
    """Number of updates between the fetch that a gradient used and its own application."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._sum = 0

    def add(self, staleness: int) -> None:
        self._counts[staleness.bit_length()] += 1
        self._sum += staleness

    def report(self) -> dict[str, object]:
        """{"staleness": {"0": n, "1": n, "2-3": n, "4-7": n, ...}, "staleness_mean": x}."""
        if not (number := self._counts.total()):
            return {}
        histogram = {}
        for bits in sorted(self._counts):
            bucket = str(bits) if bits <= 1 else f"{2 ** (bits - 1)}-{2**bits - 1}"
            histogram[bucket] = self._counts[bits]
        return {"staleness": histogram, "staleness_mean": round(self._sum / number, 2)}
