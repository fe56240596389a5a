"""The bandwidths of the hosts' links, as the pushes of workers show them.

A worker reports how long each push of its newest write took to arrive (`roles/worker/flights.py`).
All pushes of a write leave at the same time, and all workers push at about the same time. So

- out of a host leaves, per second, what the pushes of its workers add up to while the faster ones
  of them are under way: the mean rate until some of them have arrived, where that is highest;
- into a host comes the sum of the rates of all pushes to its servers.

Each is a lower bound: a push is as slow as the slower one of its two links. It is tight for the
links that the others wait for, which are those that matter. A direction of a link has the same rate
as the other one. Traffic within a host does not count.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from dlctl.roles.coordinator.members.membership import Daemon, Membership
from dlctl.roles.protocol.limits import FLIGHTS_MAX
from dlctl.roles.protocol.meters import median
from dlctl.util.names import FLIGHTS
from dlctl.wire.messages import Json

KEPT = 5
"""Writes of a worker; their median counts."""


class Flight(NamedTuple):
    nbytes: int
    took_s: float

    @property
    def rate(self) -> float:
        return self.nbytes / self.took_s


class _Worker:
    """What the present process of a worker has reported."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.number = -1
        self.writes: deque[dict[str, Flight]] = deque(maxlen=KEPT)


class Bandwidths:
    def __init__(self, members: Membership) -> None:
        self._members = members
        self._workers: dict[str, _Worker] = {}
        """Since the newest cut of the model."""
        self._before: dict[str, float] = {}
        """What was known then: a host that serves little is not measured any more."""

    def cut_anew(self) -> None:
        """The traffic is another one from now on."""
        self._before, self._workers = self.of_agents(), {}

    def count(self, worker: Daemon, metrics: Json) -> None:
        """Take what a worker has reported; anything else than flights is ignored."""
        number, reported = _reported(metrics)
        known = self._workers.get(worker.name)
        if known is None or known.incarnation != worker.incarnation:
            known = self._workers[worker.name] = _Worker(worker.incarnation)
        if number <= known.number:
            return
        known.number = number
        of_links = {
            peer: flight for peer, flight in reported.items()
            if (server := self._members.get(peer)) is not None and server.agent != worker.agent
        }  # fmt: skip
        if of_links:
            known.writes.append(of_links)

    def of_agents(self) -> dict[str, float]:
        """Agent -> bytes per second of the link of its host, where something is known of it."""
        out: defaultdict[str, float] = defaultdict(float)
        into: defaultdict[str, float] = defaultdict(float)
        for name, worker in self._workers.items():
            daemon = self._members.get(name)
            if daemon is None or not daemon.alive or len(worker.writes) < KEPT:
                continue
            out[daemon.agent] += median(leaving(write.values()) for write in worker.writes)
            for peer in {peer for write in worker.writes for peer in write}:
                rates = (write[peer].rate for write in worker.writes if peer in write)
                if (server := self._members.get(peer)) is not None:
                    into[server.agent] += median(rates)
        return self._before | {agent: max(out[agent], into[agent]) for agent in {*out, *into}}


def leaving(flights: Iterable[Flight]) -> float:
    """Bytes per second of pushes that leave together: the highest mean rate until one of them has
    arrived.
    """
    each = list(flights)
    return max(
        sum(f.nbytes * min(1.0, until.took_s / f.took_s) for f in each) / until.took_s
        for until in each
    )


def _reported(metrics: Json) -> tuple[int, Mapping[str, Flight]]:
    """The number of the newest write, and its flights; (-1, {}) if there is none."""
    reported = metrics.get(FLIGHTS)
    if not (isinstance(reported, list | tuple) and len(reported) == 2):
        return -1, {}
    number, of = reported
    if type(number) is not int or not isinstance(of, dict) or len(of) > FLIGHTS_MAX:
        return -1, {}
    return number, dict(_valid(of))


def _valid(of: Mapping[Any, Any]) -> Iterator[tuple[str, Flight]]:
    for peer, pair in of.items():
        if not (isinstance(pair, list | tuple) and len(pair) == 2):
            continue
        nbytes, took_s = pair
        if type(nbytes) is int and isinstance(took_s, float) and 0 < took_s < math.inf:
            yield str(peer), Flight(min(max(nbytes, 0), 2**53), took_s)
