"""Another cut of the model while the run is under way: the servers' parts follow the bandwidths of
their hosts' links (`[servers] layout`), which workers measure.

    running     a decision of the method's lead is due, and another cut would make a round shorter
    closing     the decision carries the number of the cut: each server makes that step, and then
                takes and answers nothing. So no worker can compute for a later step
    saving      all servers have made the step: a checkpoint, without the workers' residuals, as a
                worker that waits for a server may not be able to save
    made        one record: the new bounds, and the checkpoint that has their values
    moving      each server drops its shard and joins the run again, with a new term, for the part
                that it has now; it reads the values from the checkpoint
    announced   all serve: the workers are told the new bounds, and where each server is, as it may
                have been replaced; they resend what was not acknowledged

Until the record nothing has changed: whatever dies or is late before it, the cut is given up, and
the servers go on. From the record on it is made: whoever dies is replaced by a process that
continues with the new cut, and the checkpoint has all that was ever acknowledged. In between no
server process is replaced: if one was, it may have answered, and the cut is given up.

- The numbers of pushes continue, shard by shard: one whose ack was lost is a duplicate.
- A worker keeps a push until it is acknowledged. All of those are for steps that were made: they
  are in the values, or late. It resends their numbers without the values, which are of other parts.
- A server's new term fences whatever was sent to its old part. What a server answers counts for a
  worker that has joined that term, and a join counts if both know the same cut.
- A checkpoint that is asked for while servers move is saved when all serve (`Checkpointing`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from dlctl.algorithms.base import Lead
from dlctl.job import shard_weights
from dlctl.job.link_shares import HostLink, round_time
from dlctl.model.cut import Bounds
from dlctl.optim import bounds as cuts
from dlctl.records.memory import Cut
from dlctl.roles.coordinator.checkpointing import Checkpointing
from dlctl.roles.coordinator.members.membership import Daemon
from dlctl.roles.coordinator.run_state import CoordinatorPart
from dlctl.roles.coordinator.supervision.registration import Registration
from dlctl.roles.coordinator.training.bandwidths import Bandwidths
from dlctl.roles.coordinator.training.quorum import Quorums, is_current
from dlctl.util import units
from dlctl.wire import messages as m
from dlctl.wire.messages import Json

GAIN_MIN = 0.2
"""A cut that makes a round shorter by a smaller part is not worth its pause."""
GAIN_S_MIN = 0.05
"""Nor one that makes it shorter by less: on links that fast a push takes its latency, and what is
measured is no bandwidth."""
CLOSED_S_MAX = 30.0
"""How long the servers pause for a cut before it is given up. If the newest checkpoint took longer,
none is tried."""
PAUSES_MAX = 16
"""A cut that was given up is tried again after twice the time, and so on, up to this multiple."""


@dataclass(slots=True)
class _Attempt:
    number: int
    clock: int
    """The step behind which the servers pause."""
    bounds: Bounds
    terms: tuple[int, ...]
    """Of the servers' processes."""
    until: float
    ratio: float
    """The time of a round with the new cut, as a part of that with the present one."""
    is_saving: bool = False


@dataclass(eq=False)
class Recutting(CoordinatorPart):
    side: Lead
    registration: Registration
    quorums: Quorums
    checkpointing: Checkpointing
    bandwidths: Bandwidths
    _attempt: _Attempt | None = field(default=None, init=False)
    _next_at: float | None = field(default=None, init=False)
    """None: the workers were not released yet."""
    _failures: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        servers = self.run.job.servers
        self.is_possible = (
            servers.layout in shard_weights.KINDS and servers.recut_s > 0
            and self.side.allows_cuts and self.quorums.is_asked and servers.count > 1
        )  # fmt: skip
        self.wanted = self._better
        """Which cut would be better, if any, and by how much."""
        if self.is_possible:
            self.quorums.cut_behind = self._begin

    def is_under_way(self) -> bool:
        """Whether the servers are not at one cut: nothing else may ask them to save."""
        return self._attempt is not None or self.registration.is_moving()

    def deadline(self) -> float | None:
        return self._attempt.until if self._attempt is not None else None

    def waits_for(self, number: int) -> bool:
        """Whether a server that has paused for this cut waits for it with reason."""
        return self._attempt is not None and self._attempt.number == number

    # ------------------------------------------------------------ begin

    def _begin(self, clock: int, now: float) -> int:
        """The number of the cut behind this step; 0: there is none."""
        if not self._is_due(now) or (found := self.wanted()) is None:
            return 0
        bounds, ratio = found
        terms = tuple(server.term for server in self.members.of_role("server"))
        number = self.context.next_number()
        until = now + CLOSED_S_MAX
        self._attempt = _Attempt(number, clock, bounds, terms, until, ratio)
        return number

    def _is_due(self, now: float) -> bool:
        if self._next_at is None:
            self._wait(self.run.released_at or now)
        assert self._next_at is not None
        servers = self.members.of_role("server")
        return (
            now >= self._next_at and self.run.is_working and self.run.shutdown is None
            and not self.is_under_way() and not self.checkpointing.active
            and self.checkpointing.last_s < CLOSED_S_MAX
            and all(server.alive and server.has_served and server.address for server in servers)
        )  # fmt: skip

    def _wait(self, now: float) -> None:
        self._next_at = now + self.run.job.servers.recut_s * min(2**self._failures, PAUSES_MAX)

    def _better(self) -> tuple[Bounds, float] | None:
        """Bounds that make a round shorter by enough, and how much time remains of it. None: there
        are none, or too little is known.
        """
        layout, job = self.registration.layout, self.run.job
        links = self._links()
        if layout is None or links is None:
            return None
        servers = self.members.of_role("server")
        weights = shard_weights.of_links(
            links, [s.agent for s in servers], job.servers.layout, layout.size()
        )
        bounds = cuts.of_job(job, layout, weights)
        kind = shard_weights.KINDS[job.servers.layout]
        now, then = (
            round_time(list(links.values()), self._shares(b, [*links], servers), kind)
            for b in (self.registration.bounds, bounds)
        )
        ratio = then / now if now else 1.0
        gain_s = (now - then) * layout.size() * cuts.FLOAT_BYTES
        is_worth_it = ratio <= 1 - GAIN_MIN and gain_s >= GAIN_S_MIN
        return (bounds, ratio) if is_worth_it else None

    def _links(self) -> dict[str, HostLink] | None:
        """Agent -> the link of its host; None: one is not known."""
        measured, known = self.bandwidths.of_agents(), dict[str, HostLink]()
        servers, workers = self.members.of_role("server"), self.members.of_role("worker")
        at_work = [worker for worker in workers if worker.alive and worker.asked_for_data]
        serves = {server.agent for server in servers}
        counts: defaultdict[str, int] = defaultdict(int)
        for worker in at_work:
            counts[worker.agent] += 1
        for agent in sorted({*serves, *counts}):
            rate = measured.get(agent) or self._of_job(agent)
            if not rate:
                return None
            known[agent] = HostLink(rate, counts[agent], agent in serves)
        return known if any(agent in measured for agent in known) else None

    def _of_job(self, agent: str) -> float:
        """The bandwidth that the job file states for a host; 0: none."""
        host = self.registration.host_of(agent)
        return (units.parse_rate(host.bandwidth) or 0.0) if host and host.bandwidth else 0.0

    def _shares(self, of: Bounds, agents: list[str], servers: list[Daemon]) -> list[float]:
        held: defaultdict[str, int] = defaultdict(int)
        for server, (lo, hi) in zip(servers, pairwise(of), strict=True):
            held[server.agent] += hi - lo
        return [held[agent] / max(of[-1], 1) for agent in agents]

    # ------------------------------------------------------------ close, save, record

    def advance(self, now: float) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        servers = self.members.of_role("server")
        are_same = all(map(is_current, servers, attempt.terms))
        if self.run.shutdown is not None or not are_same or now >= attempt.until:
            why = "it took too long" if are_same else "a server was replaced"
            self._give_up("the run ends" if self.run.shutdown is not None else why, now)
        elif not (attempt.is_saving or self.checkpointing.active) and self.quorums.have_made(
            attempt.clock
        ):
            attempt.is_saving = True
            done = partial(self._on_saved, attempt.number)
            self.control.begin_checkpoint(now, done, of_servers=True)

    def _on_saved(self, number: int, row: Json) -> None:
        attempt, now = self._attempt, row["at"]
        if attempt is None or attempt.number != number:
            return
        servers = self.members.of_role("server")
        if row["error"] or not all(map(is_current, servers, attempt.terms)):
            self._give_up(row["error"] or "a server was replaced", now)
            return
        self._attempt, self._failures = None, 0
        cut = Cut(number, attempt.clock + 1, row["path"], attempt.terms)
        self.registration.recut(cut, attempt.bounds)
        self.bandwidths.cut_anew()
        self._wait(now)
        sizes = ", ".join(f"{hi - lo:,}" for lo, hi in pairwise(attempt.bounds))
        text = f"the model is cut anew, by measured bandwidths: {sizes} elements"
        self.context.event("recut", "", text, ratio=round(attempt.ratio, 3))

    def _give_up(self, why: str, now: float) -> None:
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        self._failures += 1
        self._wait(now)
        self.quorums.go_on()
        for server in self.members.of_role("server"):
            self.context.send(server.name, m.Recut(attempt.number, is_made=False))
        self.context.event("recut", "", f"the model is not cut anew: {why}")

    # ------------------------------------------------------------ what servers report

    def on_report(self, server: Daemon, metrics: Json) -> None:
        """Tell a server that has paused how it goes on, if it does not know."""
        cut = self.registration.cut
        if self.registration.is_of_old_cut(server):
            self.context.send(server.name, m.Recut(cut.number, is_made=True))
        elif type(paused := metrics.get("paused")) is int and not self.waits_for(paused):
            self.context.send(server.name, m.Recut(paused, is_made=False))
