"""One decider for all shards: a server that asks, and the part of the coordinator that answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from server_lives import Keeping, Life

from dlctl import registry
from dlctl.algorithms.base import Lead
from dlctl.errors import RemoteProtocolError
from dlctl.job.config import Choice, Job, JobFile, Servers, Workers
from dlctl.records.memory import Memory, Quorum
from dlctl.roles.coordinator.members.membership import Daemon, Membership
from dlctl.roles.coordinator.persistence import Lasting
from dlctl.roles.coordinator.records import EventContext
from dlctl.roles.coordinator.run_state import RunState
from dlctl.roles.coordinator.training.quorum import Quorums
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.retry import BACKOFF_MAX
from dlctl.roles.protocol.rows import packed, rows_in
from dlctl.sim.keys import SimulatedKeys
from dlctl.util.names import HOME_AGENT
from dlctl.wire import messages as m
from dlctl.wire.machine import DeadlineReached, Note, Reconnected, Send
from dlctl.wire.messages import APPLIED, DUPLICATE, HELD, LATE, REFUSED

METHOD = registry.load("algorithms", "toy-quorum")
SAMPLES = 3
"""Of each push that is made here."""
Pairs = Iterable[tuple[int, int]]
Triples = list[list[int]]


def decided(clock: int, used: Pairs, gone: Pairs = ()) -> m.Decided:
    return m.Decided(clock, packed(used), packed(gone))


# ---------------------------------------------------------------- a server


class Asking(Life):
    """A server of the toy, with three workers; their pushes are one-hot, at their own slots."""

    def __init__(self, keeping: Keeping | None = None, term: int = 1, **more: Any) -> None:
        super().__init__(keeping or Keeping(), term, algorithm=METHOD, **more)
        for slot in range(3):
            self.join(slot)
        if term == 1:
            self.initialise()
        self.tell(m.Members((0, 1, 2)))

    def pushes(self, slot: int, seq: int, clock: int, term: int = 1) -> list[tuple[int, str]]:
        values = [-1.0 if at == slot else 0.0 for at in range(4)]
        return self.push(seq, values, slot=slot, term=term, clock=clock)

    def hears(self, message: m.Decided) -> list[tuple[int, str]]:
        """(number, outcome) of all pushes that it settles."""
        acks = (e.message for e in self.tell(message) if isinstance(e, Send))
        return [(ack.seq, ack.outcome) for ack in acks if isinstance(ack, m.Ack)]

    @property
    def phase(self) -> tuple[str, str]:
        return self.server.phase()


def holdings(effects: list[Any]) -> list[tuple[int, Triples]]:
    """(clock, rows without samples) of all that a server tells the coordinator that it holds."""
    found = [e.message for e in effects if isinstance(e, Send) and e.peer == COORDINATOR]
    held = [(h.clock, rows_in(h.pushes, 4)) for h in found if isinstance(h, m.Holding)]
    assert all(row[3] == SAMPLES for _, rows in held for row in rows)
    return [(clock, [row[:3] for row in rows]) for clock, rows in held]


PLACES = pytest.mark.parametrize("durability", ["process", "disk"])


@PLACES
def test_the_chosen_make_the_step_and_all_others_are_late(durability: str) -> None:
    server = Asking(Keeping(durability))
    for slot in (2, 0, 1):
        assert server.pushes(slot, 0, clock=0) == [(0, HELD)]
    assert server.w == [0, 0, 0, 0]
    assert sorted(server.hears(decided(0, [(0, 1), (2, 1)]))) == [
        (0, APPLIED), (0, APPLIED), (0, LATE),
    ]  # fmt: skip
    assert (server.w, server.version) == ([0.5, 0, 0.5, 0], 1), "the mean of two"
    assert server.pushes(1, 0, clock=0) == [(0, LATE)], "asked again"
    assert server.pushes(0, 0, clock=0) == [(0, DUPLICATE)]
    assert server.pushes(1, 1, clock=0) == [(1, LATE)], "the step is over"


def test_all_that_is_held_is_told_at_every_change_and_again_while_nothing_changes() -> None:
    server = Asking()
    effects = server.tell(server.message(0, slot=1), b"worker")
    assert holdings(effects) == [(0, [[0, 1, 1]])]
    assert holdings(server.tell(server.message(0, slot=0), b"worker")) == [
        (0, [[0, 0, 1], [0, 1, 1]])
    ]
    resend_s, now, pauses = server.server.context.retries.resend_s, 0.0, []
    while len(pauses) < 5:
        deadline = server.server.deadline()
        assert deadline is not None
        if reported := holdings(server.server.handle(DeadlineReached(), deadline)):
            assert reported == [(0, [[0, 0, 1], [0, 1, 1]])]
            pauses.append((deadline - now) / resend_s)
            now = deadline
    assert pauses == [1, 2, BACKOFF_MAX, BACKOFF_MAX, BACKOFF_MAX]
    assert holdings(server.tell(decided(0, [(0, 1), (1, 1)]))) == [(1, [])]


@pytest.mark.parametrize("lost_at", [-0.1, 0.1])
def test_over_a_new_connection_all_is_told_at_once_behind_a_report(lost_at: float) -> None:
    """Also what was sent after the old one was lost: it may have arrived before the report."""
    server = Asking()
    server.pushes(0, 0, clock=0)
    effects = server.server.handle(Reconnected(COORDINATOR, lost_at), 0.2)
    assert server.server.deadline() == 0.2
    effects += server.server.handle(DeadlineReached(), 0.2)
    sent = [type(e.message) for e in effects if isinstance(e, Send)]
    assert sent[-2:] == [m.Report, m.Holding]


def test_no_news_are_told_twice_at_one_moment() -> None:
    server = Asking()
    server.pushes(0, 0, clock=0)
    assert holdings(server.tell(server.message(0), b"worker")) == [], "a repeated push"


@PLACES
def test_the_next_server_waits_for_the_chosen_pushes_that_it_has_not(durability: str) -> None:
    keeping = Keeping(durability)
    first = Asking(keeping)
    for slot in range(3):
        first.pushes(slot, 0, clock=0)
    second = Asking(keeping, 2, keep=True)
    assert second.hears(decided(0, [(0, 1), (2, 1)])) == []
    assert second.phase == ("holding step 0", "worker-0, worker-2")
    assert second.pushes(1, 0, clock=0) == [(0, HELD)]
    assert second.pushes(2, 0, clock=0) == [(0, HELD)]
    assert second.phase == ("holding step 0", "worker-0")
    assert sorted(second.pushes(0, 0, clock=0))[:2] == [(0, APPLIED), (0, APPLIED)]
    assert (second.w, second.version) == ([0.5, 0, 0.5, 0], 1)


def test_it_does_without_the_lost_push_of_who_has_died() -> None:
    server = Asking()
    server.pushes(1, 0, clock=0)
    used = [(0, 1), (1, 1)]
    assert server.hears(decided(0, used)) == []
    assert server.hears(decided(0, used, gone=[(0, 1)])) == [(0, APPLIED)]
    assert server.w == [0, 1, 0, 0]


def test_a_push_that_was_chosen_before_its_worker_died_is_used() -> None:
    server = Asking()
    for slot in range(3):
        server.pushes(slot, 0, clock=0)
    server.tell(m.Members((0, 1)))
    server.join(2, term=2)
    assert server.pushes(2, 0, clock=0, term=2) == [(0, HELD)], "beside the other one"
    settled = server.hears(decided(0, [(1, 1), (2, 1)], gone=[(2, 1)]))
    assert sorted(settled) == [(0, APPLIED), (0, LATE), (0, LATE)], "none is told to the dead"
    assert server.w == [0, 0.5, 0.5, 0]


def test_of_a_worker_that_dies_again_and_again_no_more_than_two_processes_pushes_are_held() -> None:
    server = Asking()
    for term in range(1, 9):
        server.join(2, term)
        assert server.pushes(2, 0, clock=0, term=term) == [(0, HELD)]
    assert server.server.serving is not None
    assert server.server.serving.side.held() == [(0, 2, 7, SAMPLES), (0, 2, 8, SAMPLES)]


def test_a_decision_comes_as_often_as_it_likes_and_counts_once() -> None:
    server = Asking()
    for slot in range(3):
        server.pushes(slot, 0, clock=0)
    server.hears(decided(0, [(0, 1)]))
    for slot in (0, 1):
        server.pushes(slot, 1, clock=1)
    assert server.hears(decided(0, [(0, 1)])) == []
    assert server.hears(decided(0, [(1, 1)])) == []
    assert (server.w, server.version) == ([1, 0, 0, 0], 1)


@PLACES
def test_a_shard_that_a_checkpoint_has_left_behind_passes_over_to_the_newest_step(
    durability: str,
) -> None:
    keeping = Keeping(durability)
    server = Asking(keeping)
    server.pushes(1, 0, clock=0)
    assert server.pushes(0, 0, clock=5) == [(0, HELD)]
    assert server.phase == ("holding step 0", "worker-2")
    assert sorted(server.hears(decided(5, [(0, 1)]))) == [(0, APPLIED), (0, LATE)]
    assert (server.w, server.version) == ([1, 0, 0, 0], 6)
    assert Asking(keeping, 2, keep=True).version == 6


def test_steps_of_nobody_are_passed_over_and_kept() -> None:
    keeping = Keeping()
    server = Asking(keeping)
    assert holdings(server.tell(decided(0, [(0, 1)], gone=[(0, 1)]))) == [(1, [])]
    assert server.pushes(1, 0, clock=7) == [(0, HELD)]
    assert holdings(server.tell(decided(6, []))) == [(7, [[7, 1, 1]])]
    assert (server.w, Asking(keeping, 2, keep=True).version) == ([0, 0, 0, 0], 7)


def test_a_refused_push_has_come_and_is_not_in_the_mean() -> None:
    server = Asking()
    assert server.push(0, [np.nan] * 4, slot=0) == [(0, HELD)]
    assert server.pushes(1, 0, clock=0) == [(0, HELD)]
    assert sorted(server.hears(decided(0, [(0, 1), (1, 1)]))) == [(0, APPLIED), (0, REFUSED)]
    assert server.w == [0, 1, 0, 0]
    assert server.push(1, [np.nan] * 4, slot=0, clock=1) == [(1, HELD)]
    server.pushes(1, 1, clock=1)
    assert sorted(server.hears(decided(1, [(1, 1)]))) == [(1, APPLIED), (1, REFUSED)]


def test_status_says_whom_a_server_waits_for() -> None:
    server = Asking()
    assert server.phase == ("serving", "")
    server.pushes(0, 0, clock=0)
    assert server.phase == ("holding step 0", "worker-1, worker-2")
    for slot in (1, 2):
        server.pushes(slot, 0, clock=0)
    assert server.phase == ("holding step 0", COORDINATOR)


def test_a_server_that_is_closed_for_the_last_checkpoint_asks_and_hears_nothing() -> None:
    server = Asking()
    for slot in range(3):
        server.pushes(slot, 0, clock=0)
    assert holdings(server.tell(m.Save(1, ".", is_last=True))) == []
    assert server.hears(decided(0, [(0, 1)])) == []
    assert server.version == 0
    assert server.hears(decided(0, [(0, 1)])) == []
    rows = [[0, slot, 1] for slot in range(3)]
    assert holdings(server.tell(m.Reopen(1))) == [(0, rows)]
    assert sorted(server.hears(decided(0, [(0, 1)]))) == [(0, APPLIED), (0, LATE), (0, LATE)]


BAD_ROWS = [
    np.array([1], np.int64), np.array([1, -1], np.int64), np.array([1.0, 1.0]),
    np.array([1, 1], np.int32),
]  # fmt: skip


@pytest.mark.parametrize("rows", BAD_ROWS, ids=str)
def test_rows_of_another_kind_are_refused(rows: np.ndarray) -> None:
    server = Asking()
    server.pushes(0, 0, clock=0)
    good = packed([(0, 1)])
    for message in (m.Decided(0, rows, good), m.Decided(0, good, rows)):
        assert [type(e) for e in server.tell(message)] == [Note]
    assert server.version == 0


def test_a_worker_decides_nothing() -> None:
    server = Asking()
    server.pushes(0, 0, clock=0)
    assert [type(e) for e in server.tell(decided(0, [(0, 1)]), b"worker")] == [Note]
    assert server.version == 0


def test_a_server_of_another_method_asks_nobody() -> None:
    server = Life(Keeping())
    server.join()
    server.initialise()
    assert holdings(server.tell(server.message(0), b"worker")) == []


# ---------------------------------------------------------------- the coordinator


class Office:
    """The part of a coordinator that has the lead decide; three workers, two servers."""

    def __init__(self, backups: int = 1, method: str = "toy-quorum") -> None:
        self.context = EventContext(1.0)
        placed = {f"worker-{slot}": HOME_AGENT for slot in range(3)}
        placed |= {f"server-{shard}": HOME_AGENT for shard in range(2)}
        self.members = Membership((HOME_AGENT,), placed, {})
        job = JobFile(
            job=Job(name="quorum", task="none"), algorithm=Choice(name=method),
            servers=Servers(count=2), workers=Workers(count=3),
        )  # fmt: skip
        method_ = registry.load("algorithms", method)
        self.run = RunState("run", job, method_, SimulatedKeys(b"key"), self.context, self.members)
        own = {"backups": backups} if method_ is METHOD else {}
        self.side = method_.lead(method_.Options(**own))
        self.quorums = Quorums(self.run, self.side)
        self.numbers = 0
        for name in placed:
            self.comes(name)
        for state in ("starting", "running"):
            self.run.change_state(state, "")

    def comes(self, name: str) -> Daemon:
        """A new process is at work."""
        daemon = self.members.daemons[name]
        self.dies(name)
        daemon.begin(0.0)
        daemon.term += 1
        daemon.registered = daemon.model_ready = daemon.asked_for_data = True
        daemon.peer = f"connection of {name}.{daemon.term}".encode()
        return daemon

    def dies(self, name: str) -> None:
        daemon = self.members.daemons[name]
        if daemon.alive:
            daemon.ended(m.ProcessExited(daemon.name, daemon.incarnation, -9, ()), 0.0)
            daemon.back_off(0.0)

    def says(self, shard: int, clock: int, *slots: int, **more: Any) -> None:
        """Server `shard` holds pushes for `clock` of these slots' newest processes."""
        server = self.members.daemons[f"server-{shard}"]
        terms = {slot: self.members.daemons[f"worker-{slot}"].term for slot in slots}
        at = more.pop("at", clock)
        rows = [(at, slot, term, 1) for slot, term in terms.items()]
        self.numbers += 1
        of = (more.pop("term", server.term), more.pop("number", self.numbers))
        message = m.Holding(shard, *of, clock, packed(rows))
        self.quorums.on_holding(more.pop("peer", server.peer), message, 0.0)

    def decided(self, now: float = 0.0) -> dict[str, tuple[int, Triples, Triples]]:
        """Server -> (clock, used, gone) that it is sent now."""
        self.quorums.advance(now)
        return {
            str(effect.peer): (
                effect.message.clock,
                rows_in(effect.message.used, 2),
                rows_in(effect.message.gone, 2),
            )
            for effect in self.context.clear()
            if isinstance(effect, Send) and isinstance(effect.message, m.Decided)
        }


def both(clock: int, used: Triples, gone: Triples | None = None) -> dict[str, Any]:
    return {f"server-{shard}": (clock, used, gone or []) for shard in range(2)}


def test_a_push_has_come_when_all_shards_hold_it() -> None:
    office = Office()
    office.says(0, 0, 0, 1)
    assert office.decided() == {}
    office.says(1, 0, 1, 2)
    assert office.decided() == {}, "only worker-1 has come"
    office.says(0, 0, 0, 1, 2)
    assert office.decided() == both(0, [[1, 1], [2, 1]])
    office.says(1, 0, 0, 1, 2)
    assert office.decided() == {"server-1": (0, [[1, 1], [2, 1]], [])}, "it stays like this"


def test_the_next_step_is_decided_when_all_have_made_this_one() -> None:
    office = Office()
    for shard in range(2):
        office.says(shard, 0, 0, 1)
    office.decided()
    office.says(0, 1, 0, 1)
    assert office.decided() == {}, "it has made the step"
    office.says(1, 0, 0, 1, at=1)
    assert office.decided() == {"server-1": (0, [[0, 1], [1, 1]], [])}
    office.says(1, 1, 0, 1)
    assert office.decided() == both(1, [[0, 1], [1, 1]])


class Patient(Lead):
    """All that have come count when so many seconds are over."""

    chooses = True
    wait_s = 0.1 + 0.2

    def quorum(
        self, clock: int, came: Mapping[int, int], members: frozenset[int], waited_s: float
    ) -> frozenset[int] | float:
        return frozenset(came) if waited_s >= self.wait_s else self.wait_s


def test_a_lead_that_wants_to_wait_is_asked_again_in_time() -> None:
    office = Office()
    office.quorums.side = Patient(None)
    for shard in range(2):
        office.says(shard, 0, 0)
    assert office.decided(7.1) == {}
    due_at = office.quorums.deadline()
    assert due_at is not None
    assert due_at == pytest.approx(7.4)
    for shard in range(2):
        office.says(shard, 0, 0, 1)
    assert office.decided(7.2) == {}
    assert office.quorums.deadline() == due_at, "since all shards are at this clock"
    assert office.decided(due_at) == both(0, [[0, 1], [1, 1]])
    assert office.quorums.deadline() is None
    for shard in range(2):
        office.says(shard, 1, 0)
    assert office.decided(8.0) == {}
    assert office.quorums.deadline() == pytest.approx(8.3), "every clock has its own time"


def test_when_members_leave_fewer_are_enough() -> None:
    office = Office()
    for shard in range(2):
        office.says(shard, 0, 2)
    assert office.decided() == {}
    office.members.daemons["worker-0"].drained = True
    assert office.decided() == both(0, [[2, 1]])


def test_the_dead_have_not_come() -> None:
    office = Office()
    for shard in range(2):
        office.says(shard, 0, 0, 1)
    office.dies("worker-1")
    assert office.decided() == both(0, [[0, 1]])


def test_a_process_in_a_dead_one_s_place_has_not_come_with_its_push() -> None:
    office = Office(backups=0)
    for shard in range(2):
        office.says(shard, 0, 0, 1, 2)
    office.comes("worker-1")
    assert office.decided() == {}
    for shard in range(2):
        office.says(shard, 0, 0, 1, 2)
    assert office.decided() == both(0, [[0, 1], [1, 2], [2, 1]])


def test_who_dies_after_being_chosen_is_told_to_those_who_wait() -> None:
    office = Office()
    for shard in range(2):
        office.says(shard, 0, 0, 1)
    office.decided()
    office.says(0, 1)
    office.comes("worker-0")
    assert office.decided() == {"server-1": (0, [[0, 1], [1, 1]], [[0, 1]])}
    assert office.decided() == {}
    office.comes("server-1")
    office.says(1, 0)
    assert office.decided() == {"server-1": (0, [[0, 1], [1, 1]], [[0, 1]])}


def test_nothing_is_decided_while_a_server_is_away() -> None:
    office = Office()
    office.says(0, 0, 0, 1)
    office.says(1, 0, 0, 1)
    office.dies("server-1")
    assert office.decided() == {}
    office.comes("server-1")
    office.says(1, 0, 1, 2)
    assert office.decided() == {}
    office.says(0, 0, 1, 2)
    assert office.decided() == both(0, [[1, 1], [2, 1]])


def test_the_next_coordinator_stands_by_what_was_decided_and_waits_for_all_shards() -> None:
    first = Office()
    for shard in range(2):
        first.says(shard, 0, 0, 1)
    first.decided()
    newest = first.quorums.newest
    assert newest == Quorum(0, ((0, 1), (1, 1)))
    second = Office()
    second.quorums.recall(Memory(json.loads(json.dumps({"quorum": newest.to_json()}))), 0.0)
    second.says(0, 1, 1, 2)
    assert second.decided() == {}, "server-1 has not been heard"
    second.says(1, 0, 1, 2)
    assert second.decided() == {"server-1": (0, [[0, 1], [1, 1]], [])}
    assert second.quorums.newest == newest
    second.says(1, 1, 1, 2)
    assert second.decided() == both(1, [[1, 1], [2, 1]])


def test_after_a_checkpoint_shards_that_are_behind_pass_over_to_the_newest_step() -> None:
    office = Office()
    office.says(0, 9)
    assert office.decided() == {}
    office.says(1, 11, 0, 1)
    assert office.decided() == {"server-0": (10, [], [])}
    office.says(0, 11, 0, 1)
    assert office.decided() == both(11, [[0, 1], [1, 1]])


def test_words_of_others_and_of_before_are_not_heard() -> None:
    office = Office()
    office.says(0, 0, 0, 1)
    office.says(1, 0)
    office.says(1, 0, 0, 1, peer=b"stranger")
    office.says(1, 0, 0, 1, term=0)
    office.says(1, 0, 0, 1, term=2)
    office.says(1, 0, 0, 1, number=1)
    assert office.decided() == {}
    office.says(1, 0, 0, 1)
    assert office.decided() == both(0, [[0, 1], [1, 1]])


@pytest.mark.parametrize("rows", [*BAD_ROWS, np.array([0, 1], np.int64)], ids=str)
def test_a_report_of_another_form_is_refused(rows: np.ndarray) -> None:
    office = Office()
    peer = office.members.daemons["server-0"].peer
    assert peer is not None
    with pytest.raises(RemoteProtocolError, match="rows"):
        office.quorums.on_holding(peer, m.Holding(0, 1, 1, 0, rows), 0.0)


def test_a_server_that_there_is_not_and_a_method_that_does_not_ask_are_refused() -> None:
    for office, shard in ((Office(), 7), (Office(method="sync"), 0)):
        with pytest.raises(RemoteProtocolError, match="quorum"):
            office.quorums.on_holding(b"x", m.Holding(shard, 1, 1, 0, packed([])), 0.0)
        assert office.decided() == {}


def test_a_decision_leaves_when_it_is_on_the_disk() -> None:
    lasting = Lasting()
    lasting.written()
    message = decided(0, [(0, 1)])
    assert lasting.may_leave(message)
    lasting.remembers("quorum", [0, [[0, 1]]])
    assert not lasting.may_leave(message)
    assert lasting.may_leave(m.Heard())
    lasting.written()
    assert lasting.may_leave(message)
