"""The norm of an update that is split over several shards, which clip it by the common norm.

    server -> coordinator   NormPart    the square of the norm of its part of step t
    coordinator -> server   NormTotal   their sum, once every shard has reported its part

A shard that is beyond t has no part of it, and adds nothing. Shards proceed to t + 1 only when the
sum of t is known, so there is one sum to persist. It is persisted before it is sent, and final: a
shard whose server was replaced may compute another part of step t, since the step may have lost a
member meanwhile, but clips by the same norm as the others.

Servers resend their parts until they are answered; the coordinator has no retry timer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from dlctl.errors import RemoteProtocolError
from dlctl.records.memory import Entry, Memory, Norm
from dlctl.roles.coordinator.members.membership import Daemon
from dlctl.roles.coordinator.records import Owner
from dlctl.roles.coordinator.run_state import RunState
from dlctl.roles.coordinator.training.quorum import is_current
from dlctl.wire import messages as m
from dlctl.wire.machine import Peer


class Norms(Owner):
    PERSISTED = frozenset({"newest"})

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.newest: Norm | None = None
        self._parts: dict[int, m.NormPart] = {}
        """Shard -> its newest part of the squared norm."""
        self._waiting: set[int] = set()
        """Shards that wait for an answer."""

    def on_part(self, peer: Peer, part: m.NormPart, now: float) -> None:
        """Record a shard's part of the norm. Raises RemoteProtocolError for an unknown server, or a
        square that is negative or not finite.
        """
        server = self.run.members.get(f"server-{part.shard}")
        if server is None or not 0 <= part.squared < math.inf:
            raise RemoteProtocolError("not a valid part of a norm, or the server is unknown")
        if server.peer != peer or not is_current(server, part.term):
            return  # Its connection is new: its next report identifies it.
        before = self._parts.get(part.shard)
        if before is not None and (part.term, part.clock) < (before.term, before.clock):
            return
        self._parts[part.shard] = part
        self._waiting.add(part.shard)

    def advance(self) -> None:
        """Answer the waiting shards whose total is known."""
        for shard in sorted(self._waiting):
            part = self._parts[shard]
            if (total := self._total(part.clock)) is not None:
                self._waiting.discard(shard)
                self.run.context.send(f"server-{shard}", m.NormTotal(part.clock, total))

    def _total(self, clock: int) -> float | None:
        if self.newest is not None and clock == self.newest.clock:
            return self.newest.squared
        parts = [self._part(server, clock) for server in self.run.members.of_role("server")]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        self.newest = Norm(clock, sum(known))
        return self.newest.squared

    def _part(self, server: Daemon, clock: int) -> float | None:
        """What a shard adds to the sum of this clock; None: unknown so far."""
        part = self._parts.get(server.index)
        if part is not None and part.clock == clock:
            return part.squared
        versions = [server.metrics.get("version", 0), part.clock if part is not None else 0]
        return 0.0 if max(versions) > clock else None

    def memory(self) -> Iterator[Entry]:
        yield Entry(Norm.KEY, self.newest)

    def recall(self, memory: Memory, now: float) -> None:
        """Continue with the sum of the previous coordinator."""
        self.newest = memory.piece(Norm) or self.newest
