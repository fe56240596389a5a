"""One decider for all shards: which pushes of a clock count (`Lead.quorum`).

    server -> coordinator   Holding   the step that it is at, and all that it holds
    coordinator -> server   Decided   to those that have not made the step of the newest decision

A push has arrived when all shards hold it. The lead decides about one clock at a time, and about
the next one when all shards have made the step: so there is one decision to persist, and a shard's
next report acknowledges it. A decision is on the disk before it is sent, and never changed.

- The coordinator has no retry timer: servers resend what they hold, and those that are behind then
  get the decision again. A lost message, a new server and a new coordinator are one case.
- A lead may defer a decision for a given time, and is asked again after that.
- A new coordinator knows the newest decision, and waits for a report of every shard.
- Only pushes of live processes are chosen. Those that died since are sent with the decision: a
  shard whose server was replaced does not wait for a push that will not be resent.
- After a checkpoint shards may be at different steps, and replicas would wait forever for those
  behind: these skip to the newest step. That, too, is a decision, without pushes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dlctl.algorithms.base import Lead, Process
from dlctl.errors import RemoteProtocolError
from dlctl.records.memory import Entry, Memory, Quorum
from dlctl.roles.coordinator.members.membership import Daemon
from dlctl.roles.coordinator.records import Owner
from dlctl.roles.coordinator.run_state import RunState
from dlctl.roles.protocol.rows import packed, rows_in
from dlctl.wire import messages as m
from dlctl.wire.machine import Peer

ROUNDING_S = 1e-6
"""The time since a deadline was set may be rounded down by so much when it is due."""


class HoldingReport(NamedTuple):
    """The newest report of a shard."""

    term: int
    number: int
    clock: int
    pushes: frozenset[tuple[int, int, int, int]]
    """(clock, slot, term, samples)"""


class Quorums(Owner):
    PERSISTED = frozenset({"newest"})

    def __init__(self, run: RunState, side: Lead) -> None:
        self.run = run
        self.side = side
        shard = run.algorithm.shard
        self.is_asked = shard is not None and shard.of(side.options).asks_lead
        self.newest: Quorum | None = None
        """The newest decision."""
        self._is_new = True
        """Which of these processes have died was not looked up yet."""
        self._reports: dict[int, HoldingReport] = {}
        """Shard -> its newest report of held pushes."""
        self._is_news = False
        """Whether a report has changed since the last decision."""
        self._members: tuple[int, ...] = ()
        self._since = (-1, 0.0)
        """(clock, the time at which all shards were seen to be at it)"""
        self._ask_after_s: float | None = None
        """How long after that the lead wants to be asked again; None: it does not."""
        self._deaths = run.members.follow(("_state", "registered", "term"), "worker")
        self._gone: frozenset[Process] = frozenset()
        self._to_notify: set[int] = set()
        self.cut_behind: Callable[[int, float], int] = lambda clock, now: 0
        """The number of the cut of the model behind a step; 0: none. Asked once a step."""
        self._cut = 0
        """Of the newest decision, while that cut is not given up. A successor gives it up."""

    def on_holding(self, peer: Peer, message: m.Holding, now: float) -> None:
        """Record the pushes that a shard holds. Raises RemoteProtocolError for an unknown server,
        or if the method has no quorum.
        """
        server = self.run.members.get(f"server-{message.shard}")
        if server is None or not self.is_asked:
            raise RemoteProtocolError("the method has no quorum, or the server is unknown")
        if server.peer != peer or not is_current(server, message.term):
            return  # Its connection is new: its next report identifies it.
        pushes = frozenset((c, slot, term, n) for c, slot, term, n in rows_in(message.pushes, 4))
        report = HoldingReport(message.term, message.number, message.clock, pushes)
        before = self._reports.get(message.shard)
        if before is not None and report[:2] < before[:2]:
            return
        self._is_news |= report != before
        self._reports[message.shard] = report
        self._to_notify.add(message.shard)

    def deadline(self) -> float | None:
        """When the lead wants to be asked again."""
        return None if self._ask_after_s is None else self._since[1] + self._ask_after_s

    def advance(self, now: float) -> None:
        """Decide if possible, and send the decision to the shards that wait for it."""
        if not self.is_asked or self.run.state in ("pending", "starting"):
            return
        members = self.run.members.live_slots()
        due_at = self.deadline()
        is_due = due_at is not None and now >= due_at
        has_changed = members is not self._members and members != self._members
        if self._is_news or is_due or has_changed:
            self._is_news, self._members, self._ask_after_s = False, members, None
            self._decide(now)
        self._send_decision()

    def _decide(self, now: float) -> None:
        servers = self.run.members.of_role("server")
        reports = ((server, self._reports.get(server.index)) for server in servers)
        known = [r for server, r in reports if r and is_current(server, r.term)]
        if len(known) < len(servers) or self._is_under_way(known):
            return
        clock = max(report.clock for report in known)
        if any(report.clock < clock for report in known):
            self._take(clock - 1, (), 0)
            return
        if self._since[0] != clock:
            self._since = clock, now
        everywhere = frozenset.intersection(*(report.pushes for report in known))
        living = [
            (slot, term, samples)
            for at, slot, term, samples in sorted(everywhere)
            if at == clock and self._is_alive((slot, term))
        ]
        if not living:
            return
        came = {slot: samples for slot, _, samples in living}
        waited_s = now - self._since[1] + ROUNDING_S
        chosen = self.side.quorum(clock, came, frozenset(self._members), waited_s)
        if isinstance(chosen, int | float):
            assert chosen > waited_s, f"asked again after {chosen} s, and {waited_s} s are over"
            self._ask_after_s = chosen
            return
        if chosen is None:
            return
        assert chosen <= came.keys(), f"{sorted(chosen)} of {sorted(came)}"
        used = tuple((slot, term) for slot, term, _ in living if slot in chosen)
        self._take(clock, used, self.cut_behind(clock, now))

    def _take(self, clock: int, used: tuple[Process, ...], cut: int) -> None:
        self.newest, self._is_new, self._cut = Quorum(clock, used), True, cut
        self._to_notify.update(self._reports)

    def have_made(self, clock: int) -> bool:
        """Whether all servers have made this step, and that is durable."""
        servers = self.run.members.of_role("server")
        reports = [(server, self._reports.get(server.index)) for server in servers]
        return all(r and is_current(s, r.term) and r.clock > clock for s, r in reports)

    def go_on(self) -> None:
        """No cut of the model follows on the newest decision."""
        self._cut = 0

    def _is_under_way(self, known: Sequence[HoldingReport]) -> bool:
        """Whether a shard has not made the step of the newest decision."""
        return self.newest is not None and any(
            report.clock <= self.newest.clock for report in known
        )

    def _is_alive(self, process: Process) -> bool:
        return self.run.members.worker(*process) is not None

    def _send_decision(self) -> None:
        """Send the newest decision to the shards that are behind it and have just reported; to all
        of those behind if a chosen process has died.
        """
        if self.newest is None:
            return
        clock, used = self.newest.clock, self.newest.processes
        if self._deaths.take() or self._is_new:
            self._is_new = False
            gone = frozenset(process for process in used if not self._is_alive(process))
            if gone != self._gone:
                self._gone = gone
                self._to_notify.update(self._reports)
        notified, self._to_notify = self._to_notify, set()
        for shard in sorted(notified):
            if self._reports[shard].clock <= clock:
                decided = m.Decided(clock, packed(used), packed(self._gone), self._cut)
                self.run.context.send(f"server-{shard}", decided)

    def memory(self) -> Iterator[Entry]:
        yield Entry(Quorum.KEY, self.newest)

    def recall(self, memory: Memory, now: float) -> None:
        """Continue with the decision of the previous coordinator."""
        if decided := memory.piece(Quorum):
            used = tuple((slot, term) for slot, term in decided.processes)
            self.newest = Quorum(decided.clock, used)


def is_current(server: Daemon, term: int) -> bool:
    """Whether this term is the server's live process."""
    return server.alive and server.registered and server.term == term
