"""One decider for all shards: which pushes of a clock count (`Lead.quorum`).

    server -> coordinator   Holding   the step that it is at, and all that it holds
    coordinator -> server   Decided   to those that have not made the step of the newest decision

A push has come when all shards hold it. The lead decides about one clock at a time, and about the
next one when all shards have made the step: so there is one decision to remember, and a shard's
next report is the acknowledgement. It is on the disk before anybody hears of it, and never changed.

- The coordinator repeats nothing by a clock of its own: servers repeat what they hold, and who is
  behind is told again then. A lost message, a new server and a new coordinator are one case.
- A lead that lets a clock wait for a while says until when, and is asked again then.
- A new coordinator knows the newest decision, and waits for a word of every shard.
- Only living processes' pushes are chosen. Who dies then is told with the decision: a shard whose
  server was replaced does not wait for what nobody will send again.
- After a checkpoint shards may be at different steps, and replicas would wait for ever for those
  that are behind: these pass over to the newest one. That, too, is a decision, without pushes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dlctl import messages as m
from dlctl.algorithms.base import Lead, Process
from dlctl.errors import RemoteProtocolError
from dlctl.machine import Peer
from dlctl.messages import Json
from dlctl.roles.coordinator.membership import Daemon
from dlctl.roles.coordinator.run_state import RunState
from dlctl.roles.protocol.rows import packed, rows_in


class Report(NamedTuple):
    """The newest that a shard has said."""

    generation: int
    number: int
    clock: int
    pushes: frozenset[tuple[int, int, int, int]]
    """(clock, slot, epoch, samples)"""


class Quorums:
    def __init__(self, run: RunState, side: Lead) -> None:
        self.run = run
        self.side = side
        shard = run.algorithm.shard
        self.is_asked = shard is not None and shard.of(side.options).asks_lead
        self.newest: tuple[int, tuple[Process, ...]] | None = None
        """The newest decision: the clock, whose pushes count."""
        self._reports: dict[int, Report] = {}
        """By shard."""
        self._is_news = False
        """Whether a shard has said anything since it was last decided."""
        self._members: tuple[int, ...] = ()
        self._since = (-1, 0.0)
        """(clock, the time at which all shards were seen to be at it)"""
        self._ask_after_s: float | None = None
        """So long after that the lead wants to be asked again."""
        self._gone: frozenset[Process] = frozenset()
        self._to_tell: set[int] = set()

    def on_holding(self, peer: Peer, message: m.Holding, now: float) -> None:
        """Raises RemoteProtocolError for a server that is not, or no longer, of this run."""
        server = self.run.members.get(f"server-{message.shard}")
        if server is None or not self.is_asked:
            raise RemoteProtocolError("nobody is to decide about that")
        if server.peer != peer or not is_current(server, message.generation):
            return  # Its connection is new: its next report tells whose it is.
        pushes = frozenset((c, slot, epoch, n) for c, slot, epoch, n in rows_in(message.pushes, 4))
        report = Report(message.generation, message.number, message.clock, pushes)
        before = self._reports.get(message.shard)
        if before is not None and report[:2] < before[:2]:
            return
        self._is_news |= report != before
        self._reports[message.shard] = report
        self._to_tell.add(message.shard)

    def deadline(self) -> float | None:
        """When the lead wants to be asked again."""
        return None if self._ask_after_s is None else self._since[1] + self._ask_after_s

    def advance(self, now: float) -> None:
        """Decide, if that can be done now, and tell those who wait."""
        if not self.is_asked or self.run.state in ("pending", "starting"):
            return
        members = self.run.members.live_slots()
        due_at = self.deadline()
        is_due = due_at is not None and now >= due_at
        if self._is_news or is_due or members != self._members:
            self._is_news, self._members = False, members
            least_s = (self._ask_after_s or 0.0) if is_due else 0.0
            self._ask_after_s = None
            self._decide(now, least_s)
        self._tell()

    def _decide(self, now: float, least_s: float) -> None:
        """least_s: that time has passed at this clock, whatever rounding makes of it."""
        servers = self.run.members.of_role("server")
        reports = [self._reports.get(server.index) for server in servers]
        known = [
            report
            for server, report in zip(servers, reports, strict=True)
            if report is not None and is_current(server, report.generation)
        ]
        if len(known) < len(servers) or self._is_under_way(known):
            return
        clock = max(report.clock for report in known)
        if any(report.clock < clock for report in known):
            self._take(clock - 1, ())
            return
        if self._since[0] != clock:
            self._since = clock, now
        everywhere = frozenset.intersection(*(report.pushes for report in known))
        living = [
            (slot, epoch, samples)
            for at, slot, epoch, samples in sorted(everywhere)
            if at == clock and self._lives((slot, epoch))
        ]
        if not living:
            return
        came = {slot: samples for slot, _, samples in living}
        waited_s = max(now - self._since[1], least_s)
        chosen = self.side.quorum(clock, came, frozenset(self._members), waited_s)
        if isinstance(chosen, int | float):
            assert chosen > waited_s, f"asked again after {chosen} s, and {waited_s} s are over"
            self._ask_after_s = chosen
            return
        if chosen is None:
            return
        assert chosen <= came.keys(), f"{sorted(chosen)} of {sorted(came)}"
        used = tuple((slot, epoch) for slot, epoch, _ in living if slot in chosen)
        self._take(clock, used)

    def _take(self, clock: int, used: tuple[Process, ...]) -> None:
        self.newest = clock, used
        self._to_tell.update(self._reports)

    def _is_under_way(self, known: Sequence[Report]) -> bool:
        """Whether a shard has not made the step of the newest decision."""
        return self.newest is not None and any(r.clock <= self.newest[0] for r in known)

    def _lives(self, process: Process) -> bool:
        return self.run.members.worker(*process) is not None

    def _tell(self) -> None:
        """Tell the newest decision to those that are behind it and have just asked, or have to hear
        that one of the chosen has died.
        """
        if self.newest is None:
            self._to_tell.clear()
            return
        clock, used = self.newest
        gone = frozenset(process for process in used if not self._lives(process))
        if gone != self._gone:
            self._gone = gone
            self._to_tell.update(self._reports)
        told, self._to_tell = self._to_tell, set()
        for shard in sorted(told):
            report = self._reports.get(shard)
            if report is not None and report.clock <= clock:
                decided = m.Decided(clock, packed(used), packed(gone))
                self.run.context.send(f"server-{shard}", decided)

    def memory(self) -> Iterator[tuple[str, Any]]:
        yield "quorum", self.newest

    def recall(self, memory: Json, now: float) -> None:
        """Stand by what the coordinator before this one has decided."""
        if decided := memory.get("quorum"):
            clock, used = decided
            self.newest = clock, tuple((slot, epoch) for slot, epoch in used)


def is_current(server: Daemon, generation: int) -> bool:
    """Whether that is the server's living process."""
    return server.alive and server.registered and server.term == generation
