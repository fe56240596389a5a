"""Bytes of pushes and fetches over the link of each host, out of it and into it.

Traffic within a host does not count. A worker reports what it has sent to each of its peers, and
received; the other end is that peer's host. Of more than 1,000 peers it reports the first. What is
stored of a worker, and shown, is the sum over its peers on other hosts: in a run of n hosts each
pair would be n^2 rows, again and again. Sums over torch.distributed, checkpoints and what daemons
tell the coordinator are not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from dlctl.roles.coordinator.members.membership import Daemon, Membership
from dlctl.util.names import LINKS
from dlctl.wire.messages import Json

OUT, IN = "out_bytes", "in_bytes"
COUNT_MAX = 2**63
Pair = tuple[int, int]
"""(sent, received)"""


class LinkBytes:
    """Cumulative over all executions of the run, as `Totals`."""

    def __init__(self, members: Membership, before: Json, daemons: Mapping[str, Json]) -> None:
        """before: the links in the newest snapshot. daemons: the rows in that snapshot, with the
        sums of `count`.
        """
        self._members = members
        self._counts: dict[str, dict[str, int]] = {
            agent: {key: _count(row.get(key)) for key in (OUT, IN)}
            for agent, row in before.items()
            if isinstance(row, dict)
        }
        pairs = {name: _pairs(row.get("metrics") or {}) for name, row in daemons.items()}
        self._counted: dict[str, tuple[int, dict[str, Pair]]] = {
            name: (row["incarnation"], pairs[name]) for name, row in daemons.items() if pairs[name]
        }
        """Worker -> its incarnation, and what it has reported of each peer on another host. Before
        there were sums, these were in the rows."""
        self._summed = {
            name: (row["incarnation"], _sum_in(row.get("metrics") or {}))
            for name, row in daemons.items()
        }
        """What an earlier coordinator has counted, until a worker's first report."""

    def count(self, worker: Daemon, metrics: Json) -> Json:
        """Count what a process of a worker has reported. Returns these metrics with the sum in
        place of each peer.
        """
        if LINKS not in metrics:
            return metrics
        away = {name: pair for name, pair in _pairs(metrics).items() if self._is_away(worker, name)}
        before = self._before(worker, away)
        for name, now in away.items():
            was = before.get(name, (0, 0))
            # The counters were reset, as when a worker has joined again.
            sent, received = (n - w if n >= w else n for n, w in zip(now, was, strict=True))
            self._add(worker.agent, sent, received)
            self._add(self._members.daemons[name].agent, received, sent)
        if away:
            self._counted[worker.name] = (worker.incarnation, away)
        sent, received = _sum(away.values())
        return metrics | {LINKS: {OUT: sent, IN: received}}

    def _is_away(self, worker: Daemon, name: str) -> bool:
        peer = self._members.get(name)
        return peer is not None and peer.agent != worker.agent

    def _before(self, worker: Daemon, away: Mapping[str, Pair]) -> Mapping[str, Pair]:
        """What has been counted of this process. Of what an earlier coordinator has counted only
        the sum is known, and each peer has its share of that, as of the present sum.
        """
        if worker.name in self._counted:
            of, before = self._counted[worker.name]
            return before if of == worker.incarnation else {}
        of, (sent, received) = self._summed.pop(worker.name, (0, (0, 0)))
        if of != worker.incarnation:
            return {}
        outs = _shares(sent, [pair[0] for pair in away.values()])
        ins = _shares(received, [pair[1] for pair in away.values()])
        return dict(zip(away, zip(outs, ins, strict=True), strict=True))

    def _add(self, agent: str, out: int, into: int) -> None:
        counts = self._counts.setdefault(agent, {OUT: 0, IN: 0})
        counts[OUT] += out
        counts[IN] += into

    def look(self) -> Json:
        """Agent -> {host, out_bytes, in_bytes}; {} while there is no traffic between hosts."""
        found: Json = {}
        for agent, counts in sorted(self._counts.items()):
            daemon = self._members.get(agent)
            found[agent] = {"host": (daemon.host if daemon else "") or agent, **counts}
        return found


def _sum(pairs: Iterable[Pair]) -> Pair:
    both = [*pairs]
    return sum(sent for sent, _ in both), sum(received for _, received in both)


def _sum_in(metrics: Json) -> Pair:
    """The sum in stored metrics."""
    found = metrics.get(LINKS)
    return (_count(found.get(OUT)), _count(found.get(IN))) if isinstance(found, dict) else (0, 0)


def _shares(total: int, of: Sequence[int]) -> list[int]:
    """The total, divided in proportion to `of`. A total that is larger than all of them is of
    counters that were reset: nothing of it is in them.
    """
    whole = sum(of)
    if total > whole or not whole:
        return [0] * len(of)
    ends = [total * n // whole for n in accumulate(of)]
    return [hi - lo for lo, hi in pairwise([0, *ends])]


def _pairs(metrics: Json) -> dict[str, Pair]:
    """The valid ones of the reported pairs."""
    found: dict[str, Pair] = {}
    reported = metrics.get(LINKS)
    for peer, pair in reported.items() if isinstance(reported, dict) else ():
        if isinstance(pair, list | tuple) and len(pair) == 2:
            found[str(peer)] = _count(pair[0]), _count(pair[1])
    return found


def _count(value: Any) -> int:
    """0 for what is no count."""
    return value if type(value) is int and 0 <= value < COUNT_MAX else 0
