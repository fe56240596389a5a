"""Several tables on one server: each is a shard of its own, and who takes part is common to all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from manifests import whole
from server_lives import LAYOUT, RUN, SIZE, Keeping, KillAt, Killed, Life

from daemons.files.arrays import Files
from dlctl import registry
from dlctl.algorithms.base import MODEL, Method, PushOutcome, Shape, ShardSide, Table
from dlctl.algorithms.methods.downpour import Options, Replica
from dlctl.algorithms.methods.downpour import Server as Downpour
from dlctl.compress.base import Delta
from dlctl.errors import DlctlError
from dlctl.model.flat import Layout
from dlctl.optim.adagrad import Adagrad
from dlctl.roles.protocol.effects import ArraysSaved, LoadArrays, SaveArrays
from dlctl.roles.protocol.token import sign
from dlctl.roles.server.dedup import HELD_REACH
from dlctl.roles.server.held_fetches import HELD_FETCHES_MAX
from dlctl.runs import checkpoints
from dlctl.shards.base import no_point
from dlctl.wire import messages as m
from dlctl.wire.machine import Note, Received, Send
from dlctl.wire.messages import APPLIED, BUFFERED, DUPLICATE, GAP, HELD, LATE, REFUSED, Packed

CELLS = 6
W, SEEN, LAST, MEAN = range(4)


def cells(layout: Layout) -> int:
    return CELLS


METHOD = Method(
    Options=Options,
    replica=Replica,
    shard=Downpour,
    shape=Shape(
        tables=(
            MODEL,
            Table(name="seen", rule="add", size=cells),
            Table(name="last", rule="set", size=cells),
            Table(name="mean", rule="mean", size=cells),
        )
    ),
)
PLACES = pytest.mark.parametrize("durability", ["process", "disk"])


class Tables(Life):
    """A server of `METHOD`."""

    def __init__(self, keeping: Keeping, term: int = 1, **options: Any) -> None:
        super().__init__(keeping, term, **{"algorithm": METHOD, **options})

    def pushes(
        self, table: int, seq: int, values: Any, slot: int = 0, term: int = 1, clock: int = 0,
        samples: int = 3, **more: Any,
    ) -> list[tuple[int, str]]:  # fmt: skip
        acks = self.ask(self.of(table, seq, values, slot, term, clock, samples, **more))
        assert all(ack.table == table for ack in acks)
        return [(ack.seq, ack.outcome) for ack in acks]

    def of(
        self, table: int, seq: int, values: Any, slot: int = 0, term: int = 1, clock: int = 0,
        samples: int = 3, **more: Any,
    ) -> m.Push:  # fmt: skip
        delta = Packed("none", len(values), (np.array(values, np.float32),))
        return m.Push(
            slot, term, self.term, seq, 0, 7, 9, samples, clock, delta, table=table, **more
        )

    def reads(self, table: int, request: int, clock_min: int = 0, **more: Any) -> list[Any]:
        return self.ask(m.Fetch(more.pop("slot", 0), 1, request, clock_min, table=table, **more))

    def values(self, table: int) -> list[float]:
        assert self.server.serving is not None
        return self.server.serving.tables[table].shard.w.tolist()

    def versions(self) -> list[int]:
        assert self.server.serving is not None
        return [table.shard.version for table in self.server.serving.tables]


def at_work(keeping: Keeping | None = None, *slots: int, **options: Any) -> Tables:
    """With values, and these members."""
    life = Tables(keeping or Keeping(), **options)
    for slot in slots or (0,):
        life.join(slot)
    life.initialise()
    life.tell(m.Members(slots or (0,)))
    return life


def cell(index: int, value: float = 1.0) -> list[float]:
    return [value if i == index else 0.0 for i in range(CELLS)]


def refused(life: Tables, message: m.Message) -> str:
    """Why the server does not hear of it; it says so in its log, and to nobody."""
    (note,) = life.tell(message, b"worker")
    assert isinstance(note, Note)
    return note.text


# ---------------------------------------------------------------- each by itself


def test_each_table_counts_its_own_pushes_versions_and_clocks() -> None:
    life = at_work()
    assert life.push(0) == [(0, APPLIED)]
    assert life.pushes(SEEN, 1, cell(0)) == [(1, GAP)]
    assert [life.pushes(SEEN, seq, cell(seq)) for seq in (0, 1)] == [[(0, APPLIED)], [(1, APPLIED)]]
    assert life.pushes(SEEN, 0, cell(0)) == [(0, DUPLICATE)]
    assert life.versions() == [1, 2, 0, 0]
    (read,) = life.reads(SEEN, 5)
    assert (read.table, read.request, read.version, read.clock) == (SEEN, 5, 2, 2)
    assert read.values.tolist() == [1, 1, 0, 0, 0, 0]
    assert life.w == [1, 0, 0, 0]


def test_what_is_pushed_is_added_or_takes_the_place_of_what_there_was() -> None:
    life = at_work()
    for table in (SEEN, LAST):
        for seq in (0, 1):
            life.pushes(table, seq, [1, 2, 3, 4, 5, 6])
    assert life.values(SEEN) == [2, 4, 6, 8, 10, 12]
    assert life.values(LAST) == [1, 2, 3, 4, 5, 6]


def test_a_mean_is_of_all_members_by_their_samples_once_for_each_clock() -> None:
    life = at_work(None, 0, 1)
    assert life.pushes(MEAN, 0, cell(0, 4), slot=0, samples=1) == [(0, HELD)]
    assert life.server.phase() == ('holding step 0 of table "mean"', "worker-1")
    assert life.reads(MEAN, 1, 1) == []
    answers = life.ask(life.of(MEAN, 0, cell(0, 8), 1, samples=3))
    assert [(a.seq, a.outcome) for a in answers if isinstance(a, m.Ack)] == [
        (0, HELD), (0, APPLIED), (0, APPLIED),
    ]  # fmt: skip
    (read,) = [a for a in answers if isinstance(a, m.Parameters)]
    assert (read.clock, read.values.tolist()) == (1, cell(0, 7))
    assert life.pushes(MEAN, 1, cell(0, 9), slot=1, clock=0) == [(1, LATE)]
    life.pushes(MEAN, 1, cell(1, 2), slot=0, clock=1)
    life.pushes(MEAN, 2, cell(1, 4), slot=1, clock=1)
    assert (life.values(MEAN), life.versions()[MEAN]) == (cell(1, 3), 2)


def test_a_member_that_leaves_a_mean_is_waited_for_no_more() -> None:
    life = at_work(None, 0, 1)
    life.pushes(MEAN, 0, cell(0, 4), slot=0)
    life.tell(m.Members((0,)))
    assert (life.values(MEAN), life.versions()[MEAN]) == (cell(0, 4), 1)
    life.join(1, 2)
    life.tell(m.Members((0, 1)))
    assert life.pushes(MEAN, 1, cell(0, 6), slot=0, clock=1)[-1] == (1, APPLIED), "not due yet"


def test_a_part_of_a_mean_is_refused_with_its_step() -> None:
    """Zeros in its place would count as values; and nobody may wait for this worker's push."""
    life = at_work(None, 0, 1)
    assert life.pushes(MEAN, 0, [5, 5], slot=0, at=0, is_part=True) == [(0, HELD)]
    assert life.pushes(MEAN, 0, cell(0, 4), slot=1) == [(0, HELD), (0, REFUSED), (0, APPLIED)]
    assert life.values(MEAN) == cell(0, 4)


@pytest.mark.parametrize("table", [4, 1000])
def test_of_a_table_that_there_is_not_nothing_is_heard(table: int) -> None:
    life = at_work()
    assert f"table {table}" in refused(life, life.of(table, 0, cell(0)))
    assert f"table {table}" in refused(life, m.Fetch(0, 1, 1, 0, table=table))
    assert life.versions() == [0, 0, 0, 0]


@pytest.mark.parametrize("table", [SEEN, LAST, MEAN])
@pytest.mark.parametrize(
    "delta",
    [
        Packed("none", CELLS - 1, (np.zeros(CELLS - 1, np.float32),)),
        Packed("none", CELLS + 1, (np.zeros(CELLS + 1, np.float32),)),
        Packed("none", CELLS, (np.zeros(CELLS - 1, np.float32),)),
        Packed("none", CELLS, (np.full(CELLS, np.nan, np.float32),)),
        Packed("none", CELLS, (np.full(CELLS, 1e9, np.float32),)),
        Packed("int8", CELLS, (np.zeros(CELLS, np.float32),)),
    ],
    ids=["short", "long", "cut", "NaN", "huge", "compressed"],
)
def test_what_does_not_fit_or_is_poison_is_refused_and_its_number_used_up(
    table: int, delta: Packed
) -> None:
    life = at_work()
    push = m.Push(0, 1, 1, 0, 0, 7, 9, 3, 0, delta, table=table)
    *_, ack = life.ask(push)
    assert (ack.outcome, ack.table, ack.next_seq) == (REFUSED, table, 1)
    assert life.values(table) == [0] * CELLS
    assert life.pushes(table, 1, cell(2), clock=1)[-1] == (1, APPLIED)


def test_a_clock_that_no_mean_can_be_at_is_refused() -> None:
    life = at_work()
    assert life.pushes(MEAN, 0, cell(0), clock=2**40) == [(0, REFUSED)]
    assert life.versions()[MEAN] == 0


# ---------------------------------------------------------------- ranges


def test_a_push_of_a_range_changes_these_elements_and_no_others() -> None:
    life = at_work()
    assert life.pushes(SEEN, 0, [1, 2], at=4, is_part=True) == [(0, APPLIED)]
    assert life.pushes(LAST, 0, [7], at=0, is_part=True) == [(0, APPLIED)]
    assert life.pushes(LAST, 1, [8, 9], at=2, is_part=True) == [(1, APPLIED)]
    assert life.push(0) == [(0, APPLIED)]
    assert life.pushes(W, 1, [-5], at=3, is_part=True) == [(1, APPLIED)]
    assert life.values(SEEN) == [0, 0, 0, 0, 1, 2]
    assert life.values(LAST) == [7, 0, 8, 9, 0, 0]
    assert life.w == [1, 0, 0, 5]


@pytest.mark.parametrize(
    ("count", "more"),
    [
        (2, {"at": CELLS - 1, "is_part": True}), (1, {"at": CELLS, "is_part": True}),
        (1, {"at": 2**40, "is_part": True}), (CELLS + 1, {"is_part": True}),
        (CELLS, {"at": 1}), (2, {}),
    ],
)  # fmt: skip
def test_a_push_beyond_the_slice_is_refused(count: int, more: dict[str, Any]) -> None:
    life = at_work()
    assert life.pushes(SEEN, 0, [1] * count, **more) == [(0, REFUSED)]
    assert life.values(SEEN) == [0] * CELLS


def test_the_indices_of_a_compressed_range_count_from_its_beginning() -> None:
    life = at_work()
    assert life.server.serving is not None
    parameters = life.server.serving.parameters
    topk = registry.load("compressors", "topk")
    parameters.compressor_name, parameters.compressor = "topk", topk
    one = topk(topk.Options(density=0.5, dense_below=1))
    delta = one.take(np.array([0, -3], np.float32))
    push = m.Push(0, 1, 1, 0, 0, 7, 9, 3, 0, delta, at=2, is_part=True)
    (ack,) = life.ask(push)
    assert (ack.outcome, life.w) == (APPLIED, [0, 0, 0, 3])
    far = replace(one.take(np.array([0, 0, 0, -3], np.float32)), length=2)
    (ack,) = life.ask(m.Push(0, 1, 1, 1, 0, 7, 9, 3, 0, far, at=0, is_part=True))
    assert (ack.outcome, life.w) == (REFUSED, [0, 0, 0, 3])


def test_a_read_of_a_range_is_answered_with_these_values_alone() -> None:
    life = at_work()
    life.pushes(SEEN, 0, [1, 2, 3, 4, 5, 6])
    for lo, hi in ((0, 1), (2, 5), (0, CELLS), (5, 6)):
        (read,) = life.reads(SEEN, 1, lo=lo, hi=hi, have_term=1, have_version=0)
        assert isinstance(read, m.Parameters)
        assert read.values.tolist() == [1, 2, 3, 4, 5, 6][lo:hi]
        assert not read.remembered, "nobody has the whole slice by that"


@pytest.mark.parametrize(("lo", "hi"), [(0, 7), (3, 3), (4, 2), (6, 9), (2, 0), (2**40, 2**40 + 1)])
def test_a_read_beyond_the_slice_is_not_answered(lo: int, hi: int) -> None:
    life = at_work()
    text = refused(life, m.Fetch(0, 1, 1, 0, table=SEEN, lo=lo, hi=hi))
    assert text.endswith(f"[{lo}, {hi}) of {CELLS} elements")


# ---------------------------------------------------------------- reads that wait


def requests(answers: list[Any]) -> list[tuple[int, int]]:
    """(request, clock) of each read that was answered."""
    return [(a.request, a.clock) for a in answers if not isinstance(a, m.Ack)]


def test_every_read_waits_for_its_own_clock() -> None:
    life = at_work()
    for request, clock_min in ((1, 3), (2, 1), (3, 2), (4, 2)):
        assert life.reads(SEEN, request, clock_min) == []
    assert requests(life.reads(SEEN, 5)) == [(5, 0)]
    answered = [requests(life.ask(life.of(SEEN, seq, cell(0)))) for seq in range(4)]
    assert answered == [[(2, 1)], [(3, 2), (4, 2)], [(1, 3)], []]


def test_a_read_of_another_table_waits_for_another_clock() -> None:
    life = at_work()
    assert life.reads(SEEN, 1, 1) == life.reads(LAST, 1, 1) == []
    assert requests(life.ask(life.of(SEEN, 0, cell(0)))) == [(1, 1)]
    assert requests(life.ask(life.of(LAST, 0, cell(0)))) == [(1, 1)]


@pytest.mark.parametrize("repeats", [False, True])
def test_a_read_after_own_pushes_waits_for_them_and_is_sent_at_once(repeats: bool) -> None:
    """Whichever of the two comes first; a copy of the push, or of the read, changes nothing."""
    life = at_work()
    push = life.of(SEEN, 0, cell(0, 2.0))
    assert life.reads(SEEN, 1, after=1) == []
    ack, answer = life.ask(push)
    assert (ack.outcome, answer.values.tolist()) == (APPLIED, cell(0, 2.0))
    if repeats:
        assert [again.outcome for again in life.ask(push)] == [DUPLICATE]
    (answer,) = life.reads(SEEN, 2, after=1)
    assert answer.values.tolist() == cell(0, 2.0)
    assert life.reads(SEEN, 3, after=2) == []


def test_a_push_that_waits_in_a_mean_is_in_what_is_read_after_it() -> None:
    life = at_work(None, 0, 1)
    assert [ack.outcome for ack in life.ask(life.of(MEAN, 0, cell(0, 4.0)))] == [HELD]
    assert life.reads(MEAN, 1, after=1) == []
    *acks, answer = life.ask(life.of(MEAN, 0, cell(0, 2.0), slot=1))
    assert APPLIED in {ack.outcome for ack in acks}
    assert answer.values.tolist() == cell(0, 3.0)


@PLACES
def test_the_next_server_knows_which_pushes_a_read_waits_for(durability: str) -> None:
    keeping = Keeping(durability)
    at_work(keeping).pushes(SEEN, 0, cell(0))
    life = Tables(keeping, 2, keep=True)
    life.join(0)
    assert life.reads(SEEN, 1, after=2) == []
    (answer,) = life.reads(SEEN, 2, after=1)
    assert answer.values.tolist() == cell(0)


def test_a_read_that_is_repeated_is_answered_once() -> None:
    life = at_work()
    for _ in range(HELD_FETCHES_MAX + 1):
        life.reads(SEEN, 2, 1)
    life.reads(SEEN, 1, 1)
    assert requests(life.ask(life.of(SEEN, 0, cell(0)))) == [(2, 1), (1, 1)]


def test_of_many_reads_of_one_worker_the_oldest_are_dropped_and_nobody_else_s() -> None:
    life = at_work(None, 0, 1)
    life.reads(SEEN, 100, 1, slot=1)
    for request in range(HELD_FETCHES_MAX + 3):
        life.reads(SEEN, request, 1)
    answered = [r for r, _ in requests(life.ask(life.of(SEEN, 0, cell(0))))]
    assert answered == [100, *range(3, HELD_FETCHES_MAX + 3)]


def test_what_a_replaced_process_has_asked_for_is_not_answered() -> None:
    life = at_work()
    life.reads(SEEN, 1, 1)
    life.join(0, 2)
    assert requests(life.ask(life.of(SEEN, 0, cell(0), term=2))) == []


class Slowest(ShardSide):
    """Its clock is the least that a member has said."""

    def __init__(self, options: Any, shard: Any) -> None:
        super().__init__(options, shard)
        self.clocks: dict[int, int] = {}
        self.slots: frozenset[int] = frozenset()

    def clock(self) -> int:
        return min((self.clocks.get(slot, 0) for slot in self.slots), default=0)

    def push(self, push: m.Push, delta: Delta) -> list[PushOutcome]:
        self.clocks[push.slot] = push.clock
        return [push.outcome(APPLIED)]

    def members(self, slots: frozenset[int]) -> list[PushOutcome]:
        self.slots = slots
        return []


def test_the_clock_in_an_answer_is_the_method_s_and_a_change_of_members_may_answer_reads() -> None:
    method = Method(Options=Options, replica=Replica, shard=Slowest)
    life = at_work(None, 0, 1, algorithm=method)
    life.push(0, slot=0, clock=3)
    assert life.reads(W, 1, 2) == []
    effects = life.tell(m.Members((0,)))
    answers = [e.message for e in effects if isinstance(e, Send) and e.peer == b"worker"]
    assert [(a.request, a.clock, a.version) for a in answers] == [(1, 3, 0)]


class Moved(ShardSide):
    """Its clock may change without a push, as one that depends on a live option."""

    at = 1

    def clock(self) -> int:
        return self.at

    def push(self, push: m.Push, delta: Delta) -> list[PushOutcome]:
        return [push.outcome(BUFFERED)]


def test_a_read_is_answered_by_any_push_once_a_clock_that_went_back_is_there_again() -> None:
    method = Method(Options=Options, replica=Replica, shard=Moved)
    life = at_work(None, 0, 1, algorithm=method)
    assert life.server.serving is not None
    side = life.server.serving.side
    assert isinstance(side, Moved)
    side.at = 0
    assert life.reads(W, 1, 1, slot=1) == []
    side.at = 1
    assert requests(life.ask(life.of(W, 0, [1.0] * SIZE))) == [(1, 1)]


# ---------------------------------------------------------------- servers that die


@PLACES
def test_the_next_server_has_all_tables_as_they_were_told(durability: str) -> None:
    keeping = Keeping(durability)
    first = at_work(keeping, 0, 1)
    first.push(0)
    for seq in (0, 1):
        first.pushes(SEEN, seq, cell(seq))
    first.pushes(LAST, 0, cell(3))
    for slot in (0, 1):
        first.pushes(MEAN, 0, cell(0, 4), slot=slot)
    second = Tables(keeping, 2, keep=True)
    assert [second.values(table) for table in range(4)] == [
        [1, 0, 0, 0], [1, 1, 0, 0, 0, 0], cell(3), cell(0, 4),
    ]  # fmt: skip
    assert second.versions() == first.versions() == [1, 2, 1, 1]
    second.join(0)
    assert second.pushes(SEEN, 1, cell(1)) == [(1, DUPLICATE)]
    assert second.pushes(SEEN, 2, cell(2)) == [(2, APPLIED)]
    assert second.pushes(MEAN, 1, cell(0, 9), clock=0) == [(1, LATE)]


@PLACES
def test_one_table_s_state_is_never_taken_for_another_one_s(durability: str) -> None:
    keeping = Keeping(durability)
    at_work(keeping).pushes(SEEN, 0, cell(0))
    tables = keeping.tables
    tables["seen"], tables["last"] = tables["last"], tables["seen"]
    failed = Tables(keeping, 2, keep=True).answer()
    assert isinstance(failed, m.Failed)
    assert "table" in failed.error


STEPS: list[Callable[[Tables], Any]] = [
    lambda at: at.pushes(SEEN, 0, cell(0)),
    lambda at: at.push(0),
    lambda at: at.pushes(SEEN, 0, cell(1), slot=1),
    lambda at: at.pushes(MEAN, 0, cell(0, 2), slot=0),
    lambda at: at.pushes(MEAN, 0, cell(0, 4), slot=1),
    lambda at: at.pushes(LAST, 0, cell(5), slot=1),
    lambda at: at.join(1, 2),
    lambda at: at.pushes(SEEN, 0, cell(2), slot=1, term=2),
    lambda at: at.pushes(LAST, 0, cell(4), slot=1, term=2),
    lambda at: at.tell(m.Members((0,))),
    lambda at: at.pushes(MEAN, 1, cell(1, 6), slot=0, clock=1),
    lambda at: at.pushes(SEEN, 1, cell(0)),
]
"""What two workers do; the second term of worker-1 begins in the middle."""
HELD_AT, COMPLETED_AT, REPLACED_AT, LEFT_AT = 3, 4, 6, 9


@PLACES
def test_a_kill_between_any_two_commits_of_any_tables_leaves_them_consistent(
    durability: str,
) -> None:
    """The worker joins what is left, whichever tables know of its term, and sends again."""

    def run(kill_at: int) -> tuple[Tables, int]:
        keeping = Keeping(durability)
        life = at_work(keeping, 0, 1)
        keeping.point = kill = KillAt(kill_at)
        for number, step in enumerate(STEPS):
            try:
                step(life)
            except Killed:
                life = Tables(keeping, 2, keep=True)
                life.join(0)
                life.join(1, 2 if number >= REPLACED_AT else 1)
                life.tell(m.Members((0,) if number >= LEFT_AT else (0, 1)))
                if number == COMPLETED_AT:
                    STEPS[HELD_AT](life)  # It was not acknowledged.
                step(life)
        return life, kill.passed

    _, points = run(0)
    assert points >= 20
    for kill_at in range(1, points + 1):
        life, _ = run(kill_at)
        found = [life.values(table) for table in range(4)]
        assert found == [[1, 0, 0, 0], [2, 1, 1, 0, 0, 0], cell(4), cell(1, 6)], kill_at
        assert life.versions() == [1, 4, 2, 2], kill_at
        assert life.server.serving is not None
        for table in life.server.serving.tables:
            assert table.dedup.is_current(1, 2), "every table knows the newest term"
            assert not table.dedup.is_current(1, 1)


@PLACES
def test_a_server_that_dies_while_it_gets_its_values_has_all_tables_or_none(
    durability: str,
) -> None:
    def run(kill_at: int) -> int:
        keeping = Keeping(durability)
        life = Tables(keeping)
        life.join()
        keeping.point = kill = KillAt(kill_at)
        try:
            life.initialise()
        except Killed:
            life = Tables(keeping, 2, keep=True)
            if not life.join().initialised:
                life.initialise()
        points = kill.passed
        keeping.point = no_point
        assert life.pushes(SEEN, 0, cell(0)) == [(0, APPLIED)]
        assert life.versions() == [0, 1, 0, 0]
        return points

    for kill_at in range(1, run(0) + 1):
        run(kill_at)


def test_a_worker_joins_a_table_that_its_term_has_not_come_to() -> None:
    """The server was killed between the commits of two tables."""
    keeping = Keeping()
    life = at_work(keeping)
    life.pushes(SEEN, 0, cell(0))
    commits = []

    def killed_behind_the_first(name: str) -> None:
        commits.append(name)
        if commits.count("commit written") == 1 and name == "commit written":
            raise Killed(name)

    keeping.point = killed_behind_the_first
    with pytest.raises(Killed):
        life.join(0, 2)
    keeping.point = no_point
    second = Tables(keeping, 2, keep=True)
    assert second.server.serving is not None
    assert [t.dedup.is_current(0, 2) for t in second.server.serving.tables] == [
        True, False, False, False,
    ]  # fmt: skip
    assert second.ask(second.of(SEEN, 1, cell(0), term=1)) == [m.JoinAgain(0, 2)]
    (answer,) = second.ask(m.Join(RUN, 0, 1, _token(1)))
    assert isinstance(answer, m.Dismiss), "it is replaced, whatever this table knows"
    second.join(0, 2)
    assert [t.dedup.is_current(0, 2) for t in second.server.serving.tables] == [True] * 4
    assert second.pushes(SEEN, 0, cell(1), term=2) == [(0, APPLIED)]
    assert second.values(SEEN) == [1, 1, 0, 0, 0, 0]


def _token(term: int) -> bytes:
    return sign(b"the key", RUN, 0, term)


def test_refusals_are_counted_over_all_tables_and_over_a_restart() -> None:
    keeping = Keeping()
    life = at_work(keeping)
    life.pushes(SEEN, 0, [np.nan] * CELLS)
    life.push(0, (np.nan, 0, 0, 0))
    life.pushes(SEEN, 1, [np.inf] * CELLS)
    for at in (life, Tables(keeping, 2, keep=True)):
        assert at.server.serving is not None
        assert at.server.serving.metrics(0.0)["poison"] == {"worker-0": 3}


def test_from_the_last_checkpoint_on_nothing_comes_into_any_table() -> None:
    keeping = Keeping()
    life = at_work(keeping)
    life.tell(m.Save(1, ".", is_last=True))
    for at in (life, Tables(keeping, 2, keep=True)):
        at.join(0)
        assert [at.pushes(table, 0, cell(0)) for table in (SEEN, LAST, MEAN)] == [[]] * 3
    at.tell(m.Reopen(1))
    assert at.pushes(SEEN, 0, cell(0)) == [(0, APPLIED)]


# ---------------------------------------------------------------- buffered pushes

BUFFER = "toy-buffer"


def buffering(keeping: Keeping, term: int = 1, *, keep: bool = False) -> Life:
    """Every fourth push makes a step of the mean of four."""
    method = registry.load("algorithms", BUFFER)
    life = Life(keeping, term, keep=keep, algorithm=method, optimizer=Adagrad)
    life.join()
    if not keep:
        life.initialise()
    return life


@PLACES
def test_a_buffered_push_is_settled_and_not_yet_in_the_values(durability: str) -> None:
    keeping = Keeping(durability)
    life = buffering(keeping)
    assert [life.push(seq) for seq in range(3)] == [[(seq, BUFFERED)] for seq in range(3)]
    assert life.w == [0, 0, 0, 0]
    assert life.push(1) == [(1, DUPLICATE)]
    second = buffering(keeping, 2, keep=True)
    assert [second.push(seq) for seq in range(3)] == [[(seq, DUPLICATE)] for seq in range(3)]
    assert second.push(3) == [(3, APPLIED)]
    alone = Life(Keeping(), optimizer=Adagrad)
    alone.join()
    alone.initialise()
    alone.push(0)
    assert second.w == alone.w, "one step of the mean"
    assert second.push(4) == [(4, BUFFERED)]


def test_more_pushes_may_be_buffered_than_held() -> None:
    life = buffering(Keeping())
    life.tell(m.ChangeSettings(1, {"capacity": 3 * HELD_REACH}))
    kinds = [life.push(seq)[0][1] for seq in range(3 * HELD_REACH)]
    assert kinds == [BUFFERED] * (3 * HELD_REACH - 1) + [APPLIED]


@PLACES
def test_a_kill_at_any_point_of_a_buffered_push_loses_and_doubles_nothing(
    durability: str,
) -> None:
    def ten_pushes(kill_at: int) -> tuple[Life, int]:
        keeping = Keeping(durability)
        life = buffering(keeping)
        keeping.point = kill = KillAt(kill_at)
        for seq in range(10):
            values = np.roll([-1.0, seq, 0, 0], seq)
            try:
                life.push(seq, values)
            except Killed:
                life = buffering(keeping, 2, keep=True)
                ((again, kind),) = life.push(seq, values)
                assert (again, kind in (APPLIED, BUFFERED, DUPLICATE)) == (seq, True)
        return life, kill.passed

    def state(life: Life) -> Any:
        assert life.server.serving is not None
        shard = life.server.serving.shard
        vectors = {name: vector.tolist() for name, vector in shard.slots.items()}
        return shard.w.tolist(), vectors, shard.version, dict(shard.optimizer.counters)

    undisturbed, points = ten_pushes(0)
    assert points >= 20
    for kill_at in range(1, points + 1):
        assert state(ten_pushes(kill_at)[0]) == state(undisturbed), kill_at


# ---------------------------------------------------------------- checkpoints


def saved(lives: list[Life], run: Path) -> Path:
    """A checkpoint of these servers, as daemons and coordinator write it."""
    directory, parts = checkpoints.create(run, 12, 1), []
    for index, life in enumerate(lives):
        (effect,) = life.tell(m.Save(1, str(directory)))
        assert isinstance(effect, SaveArrays)
        sha256, nbytes = checkpoints.write_arrays(directory / effect.file, effect.arrays)
        (send,) = life.server.handle(ArraysSaved(1, sha256, nbytes, ""), 0.0)
        reply = send.message
        assert isinstance(reply, m.Saved)
        part = {"name": f"server-{index}", "file": reply.file, "sha256": sha256, "nbytes": nbytes}
        state = json.loads(json.dumps(reply.state))
        parts.append({**part, "lo": state["lo"], "hi": state["hi"], "state": state})
    layout = Layout.from_bytes(LAYOUT).to_rows()
    checkpoints.write_manifest(directory, whole(step=12, shards=parts, layout=layout))
    assert checkpoints.verify(directory) == []
    return directory


def restored(directory: Path, servers: int, **options: Any) -> list[Tables]:
    lives = []
    for index in range(servers):
        life = Tables(Keeping(), index=index, servers=servers, restore=str(directory), **options)
        (load,) = [effect for effect in life.effects if isinstance(effect, LoadArrays)]
        loaded = Files(Mock(), f"server-{index}")._loaded(load)
        effects = life.server.handle(loaded, 0.0)
        assert any(isinstance(e, Send) and isinstance(e.message, m.Serving) for e in effects)
        life.join(0, 2)
        lives.append(life)
    return lives


def filled(servers: int) -> list[Life]:
    """Servers with values of their own in every table; worker-0 and worker-1 take part."""
    lives: list[Life] = []
    for index in range(servers):
        life = Tables(Keeping(), index=index, servers=servers)
        assert life.server.serving is not None
        sizes = [table.shard.size for table in life.server.serving.tables]
        for slot in (0, 1):
            life.join(slot)
        averaged = np.zeros(0) if index else np.ones(2)
        life.ask(m.Initialise(0, 1, np.zeros(sizes[W], np.float32), averaged))
        life.tell(m.Members((0, 1)))
        for table in (W, SEEN, LAST):
            for seq in range(table + 1):
                values = -np.arange(sizes[table]) - 10 * index - 1
                assert life.pushes(table, seq, values) == [(seq, APPLIED)]
        for clock in range(5):
            for slot in (0, 1):
                life.pushes(MEAN, clock, [clock + 10 * index] * sizes[MEAN], slot, clock=clock)
        lives.append(life)
    return lives


@pytest.mark.parametrize("after", [1, 2, 3, 5])
@pytest.mark.parametrize("before", [1, 2, 4])
def test_a_checkpoint_s_tables_are_cut_anew_for_another_number_of_servers(
    tmp_path: Path, before: int, after: int
) -> None:
    lives = filled(before)
    again = restored(saved(lives, tmp_path), after)
    for table in range(4):
        wanted = [value for life in lives for value in life.values(table)]
        assert [value for life in again for value in life.values(table)] == wanted
        assert len(wanted) == (CELLS if table else SIZE)
    for life in again:
        assert life.versions() == [1, 2, 3, 5], "clocks go on where they were"


def test_a_mean_goes_on_from_a_checkpoint_at_its_clock(tmp_path: Path) -> None:
    (life,) = restored(saved(filled(1), tmp_path), 1)
    life.tell(m.Members((0,)))
    assert life.pushes(MEAN, 0, cell(0), term=2, clock=4) == [(0, LATE)]
    assert life.pushes(MEAN, 1, cell(0, 2), term=2, clock=5)[-1] == (1, APPLIED)
    (read,) = life.ask(m.Fetch(0, 2, 1, 6, table=MEAN))
    assert (read.clock, read.values.tolist()) == (6, cell(0, 2))


def test_a_restored_server_that_dies_is_replaced_with_all_tables(tmp_path: Path) -> None:
    directory, keeping = saved(filled(2), tmp_path), Keeping()
    life = Tables(keeping, restore=str(directory))
    (load,) = [effect for effect in life.effects if isinstance(effect, LoadArrays)]
    life.server.handle(Files(Mock(), "server-0")._loaded(load), 0.0)
    second = Tables(keeping, 2, keep=True, restore=str(directory))
    assert [second.values(table) for table in range(4)] == [life.values(t) for t in range(4)]
    assert second.versions() == [1, 2, 3, 5]


def test_a_checkpoint_without_a_table_is_no_state_of_this_method(tmp_path: Path) -> None:
    method = registry.load("algorithms", "downpour")
    plain = Life(Keeping(), algorithm=method)
    plain.join()
    plain.initialise()
    with pytest.raises(DlctlError, match=re.escape(f'no table "seen" of {CELLS} elements')):
        restored(saved([plain], tmp_path), 1)


def test_buffered_pushes_are_in_a_checkpoint(tmp_path: Path) -> None:
    life = buffering(Keeping())
    for seq in range(3):
        life.push(seq)
    method = registry.load("algorithms", BUFFER)
    (again,) = restored(saved([life], tmp_path), 1, algorithm=method, optimizer=Adagrad)
    assert again.push(0, term=2) == [(0, APPLIED)]
    life.push(3)
    assert again.w == life.w


@pytest.mark.parametrize("durability", ["process", "disk"])
def test_a_table_that_is_smaller_than_the_number_of_servers_is_empty_on_some(
    durability: str,
) -> None:
    one = Table(name="one", rule="add", size=lambda layout: 1)
    method = Method(
        Options=Options, replica=Replica, shard=Downpour, shape=Shape(tables=(MODEL, one))
    )
    keeping = Keeping(durability)
    life = Tables(keeping, algorithm=method, index=0, servers=2)
    life.join()
    values = np.zeros(SIZE // 2, np.float32)
    life.ask(m.Initialise(0, 1, values, np.ones(2)))
    assert life.pushes(1, 0, []) == [(0, APPLIED)]
    (read,) = life.reads(1, 1, 1)
    assert (read.clock, read.values.size) == (1, 0)
    second = Tables(keeping, 2, keep=True, algorithm=method, index=0, servers=2)
    assert second.versions() == [0, 1]


def test_what_is_received_while_a_server_is_restoring_is_not_heard(tmp_path: Path) -> None:
    directory = saved(filled(1), tmp_path)
    life = Tables(Keeping(), restore=str(directory))
    effects = life.server.handle(Received(b"worker", life.of(SEEN, 0, cell(0))), 0.0)
    assert effects == []
