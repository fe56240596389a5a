"""Bytes of pushes and fetches over the link of each host, out of it and into it.

Traffic within a host does not count. A worker reports what it has sent to each of its peers, and
received; the other end is that peer's host. Of more than 1,000 peers it reports the first. Sums
over torch.distributed, checkpoints and what daemons tell the coordinator are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        """before: the links in the newest snapshot. daemons: the rows in that snapshot."""
        self._members = members
        self._counts: dict[str, dict[str, int]] = {
            agent: {key: _count(row.get(key)) for key in (OUT, IN)}
            for agent, row in before.items()
            if isinstance(row, dict)
        }
        self._counted = {
            name: (row["incarnation"], _pairs(row.get("metrics") or {}))
            for name, row in daemons.items()
        }

    def count(self, worker: Daemon, metrics: Json) -> None:
        """Count what a process of a worker has reported."""
        reported = _pairs(metrics)
        of, before = self._counted.get(worker.name, (0, {}))
        for name, now in reported.items():
            peer = self._members.get(name)
            if peer is None or peer.agent == worker.agent:
                continue
            was = before.get(name, (0, 0)) if of == worker.incarnation else (0, 0)
            # The counters were reset, as when a worker has joined again.
            sent, received = (n - w if n >= w else n for n, w in zip(now, was, strict=True))
            self._add(worker.agent, sent, received)
            self._add(peer.agent, received, sent)
        if reported:
            self._counted[worker.name] = (worker.incarnation, reported)

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
