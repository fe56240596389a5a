"""Commits that are under way: what waits for them, in which order, and what becomes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from server_lives import KEY, RUN, SIZE, Keeping, Life

from dlctl import registry
from dlctl.roles.protocol.context import COORDINATOR, EXIT_FENCED
from dlctl.roles.protocol.effects import ArraysSaved, SaveArrays
from dlctl.roles.protocol.token import sign
from dlctl.roles.server.commits import ANSWERS_MAX, Commit, Committed
from dlctl.roles.server.server import SLOW_COMMIT_S
from dlctl.shards.base import no_point
from dlctl.shards.errors import NoRoom
from dlctl.shards.journaled import Journaled
from dlctl.shards.log import LogWrite, perform_first
from dlctl.util.names import WAITS_FOR_DISK
from dlctl.wire import messages as m
from dlctl.wire.machine import DeadlineReached, Effect, Exit, Received, Send, StopRequested
from dlctl.wire.messages import APPLIED, DUPLICATE, HELD, REFUSED

Left = list[tuple[Any, m.Message]]


@pytest.fixture(autouse=True)
def _long_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journaled, "_journal_bytes_max", lambda self: 10**6)


class OnDisk(Life):
    """A server on a disk that has nothing to do; `sync` makes its commits durable."""

    def __init__(
        self, keeping: Keeping | None = None, term: int = 1, *, begins: bool = True,
        **options: Any,
    ) -> None:  # fmt: skip
        """begins: its worker joins and brings the first values."""
        self.keeping = keeping or Keeping("disk")
        self.queue: list[Commit] = []
        self.exit: Exit | None = None
        self.now = 0.0
        super().__init__(self.keeping, term, **options)
        if term == 1 and begins:
            self.join()
            self.initialise()
        self.sync_all()

    def join(self, slot: int = 0, term: int = 1) -> Any:
        return self.say(m.Join(RUN, slot, term, sign(KEY, RUN, slot, term)))

    def initialise(self, slot: int = 0, term: int = 1) -> None:
        self.say(m.Initialise(slot, term, np.zeros(SIZE, np.float32), np.array([1.0, 2.0])))

    def tell(self, message: m.Message, peer: Any = COORDINATOR) -> list[Any]:
        return self.happens(self.server.handle(Received(peer, message), self.now))

    def say(self, message: m.Message, peer: bytes = b"worker") -> Left:
        """What leaves at once when a worker says this."""
        return self.sent(self.tell(message, peer))

    def happens(self, effects: list[Effect]) -> list[Any]:
        for effect in effects:
            assert self.exit is None, "nothing follows the exit"
            if isinstance(effect, Commit):
                self.queue.append(effect)
            if isinstance(effect, Exit):
                self.exit = effect
        return effects

    @staticmethod
    def sent(effects: list[Any]) -> Left:
        sends = [(e.peer, e.message) for e in effects if isinstance(e, Send)]
        return [(peer, each) for peer, each in sends if not isinstance(each, m.Report)]

    def sync(self) -> Left:
        """One commit becomes durable: what leaves."""
        commit = self.queue.pop(0)
        commit.write.perform()
        return self.confirm(commit.number)

    def confirm(self, number: int) -> Left:
        return self.sent(self.happens(self.server.handle(Committed(number), self.now)))

    def sync_all(self) -> Left:
        left: Left = []
        while self.queue:
            left += self.sync()
        return left

    def successor(self) -> OnDisk:
        """Who takes its place after a power loss now."""
        other = OnDisk(self.keeping.copy(), self.term + 1, keep=True)
        other.join()
        other.sync_all()
        return other

    def read(self, request: int, **options: Any) -> Left:
        return self.say(m.Fetch(0, 1, request, 0, **options))


def acks(left: Left) -> list[tuple[int, str]]:
    return [(ack.seq, ack.outcome) for _, ack in left if isinstance(ack, m.Ack)]


# ---------------------------------------------------------------- pushes


def test_an_ack_leaves_when_its_commit_is_durable() -> None:
    life = OnDisk()
    assert life.say(life.message(0)) == []
    assert (life.w, life.version) == ([1, 0, 0, 0], 1), "it is applied"
    assert life.successor().w == [0, 0, 0, 0]
    assert acks(life.sync()) == [(0, APPLIED)]
    assert life.successor().w == [1, 0, 0, 0]


def test_pushes_go_on_and_their_acks_leave_in_the_order_of_their_commits() -> None:
    life = OnDisk()
    assert [life.say(life.message(seq)) for seq in range(3)] == [[], [], []]
    assert life.version == 3
    assert [acks(life.sync()) for _ in range(3)] == [[(seq, APPLIED)] for seq in range(3)]


def test_one_sync_covers_all_and_all_acks_leave_together() -> None:
    life = OnDisk()
    for seq in range(3):
        life.say(life.message(seq))
    writes = [commit.write for commit in life.queue]
    assert perform_first(writes) == 3
    assert acks(life.confirm(life.queue[-1].number)) == [(0, APPLIED), (1, APPLIED), (2, APPLIED)]
    assert life.successor().w == [3, 0, 0, 0]


def test_a_confirmation_that_comes_late_or_twice_releases_nothing() -> None:
    life = OnDisk()
    life.say(life.message(0))
    first = life.queue[0].number
    life.sync()
    life.say(life.message(1))
    assert [life.confirm(number) for number in (first, first - 1, 0)] == [[], [], []]
    assert acks(life.sync()) == [(1, APPLIED)]


def test_a_duplicate_of_a_push_under_way_is_answered_behind_its_commit() -> None:
    life = OnDisk()
    assert life.say(life.message(0)) == life.say(life.message(0)) == []
    assert life.version == 1
    assert acks(life.sync()) == [(0, APPLIED), (0, DUPLICATE)]
    assert acks(life.say(life.message(0))) == [(0, DUPLICATE)], "nothing is under way"


def test_a_refused_push_is_settled_behind_its_commit() -> None:
    life = OnDisk()
    assert life.say(life.message(0, (np.nan, 0, 0, 0))) == []
    successor = life.successor()
    assert acks(life.sync()) == [(0, REFUSED)]
    successor.say(successor.message(0))
    assert acks(successor.sync_all()) == [(0, APPLIED)], "that one has never seen it"


def test_a_push_that_was_lost_with_its_server_is_applied_once_by_the_next() -> None:
    life = OnDisk()
    for seq in range(3):
        life.say(life.message(seq))
    assert acks(life.sync()) == [(0, APPLIED)]
    successor = life.successor()
    left = [each for seq in range(3) for each in successor.say(successor.message(seq))]
    assert acks(left) == [(0, DUPLICATE)]
    assert acks(successor.sync_all()) == [(1, APPLIED), (2, APPLIED)]
    assert successor.w == [3, 0, 0, 0]


def test_a_barrier_settles_all_its_pushes_behind_one_commit() -> None:
    life = OnDisk(algorithm=registry.load("algorithms", "sync"))
    life.join(1)
    life.tell(m.Members((0, 1)))
    life.sync_all()
    assert acks(life.say(life.message(0))) == [(0, HELD)], "it is in no commit"
    assert life.say(life.message(0, slot=1)) == []
    (commit,) = life.queue
    assert acks(life.sync()) == [(0, HELD), (0, APPLIED), (0, APPLIED)]
    assert commit.write.record


# ---------------------------------------------------------------- reads


def test_an_answer_is_of_the_version_at_which_it_was_read() -> None:
    """The shard goes on in the same memory."""
    life = OnDisk()
    life.say(life.message(0))
    assert life.read(1) == []
    life.say(life.message(1))
    assert life.w == [2, 0, 0, 0]
    ((_, ack), (_, answer)) = life.sync()
    assert isinstance(ack, m.Ack)
    assert isinstance(answer, m.Parameters)
    assert (answer.version, answer.values.tolist()) == (1, [1, 0, 0, 0])


def test_nobody_reads_what_a_power_loss_undoes() -> None:
    life = OnDisk()
    life.say(life.message(0))
    assert life.read(1) == life.read(2, exact=True) == []
    assert life.say(m.FetchBuffers(0, 1, 3)) == []
    assert len(life.sync()) == 4


def test_who_reads_without_end_does_not_fill_the_memory() -> None:
    life = OnDisk()
    life.say(life.message(0))
    for request in range(3 * ANSWERS_MAX):
        life.read(request)
    left = life.sync()
    assert len([each for _, each in left if isinstance(each, m.Parameters)]) == ANSWERS_MAX
    assert len(life.read(100)) == 1


def test_a_read_that_is_repeated_while_its_answer_waits_is_answered_once() -> None:
    life = OnDisk()
    life.say(life.message(0))
    for request in (1, 1, 2, 1):
        life.read(request)
    answers = [each.request for _, each in life.sync() if isinstance(each, m.Parameters)]
    assert answers == [1, 2]


@pytest.mark.parametrize("outcomes", [[], None])
def test_a_method_that_does_not_say_what_became_of_a_push_acknowledges_nothing(
    outcomes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push that is applied and never acknowledged would be applied again by the next server."""
    life = OnDisk()
    (table,) = life.server.serving.tables
    monkeypatch.setattr(table.side, "push", lambda push, delta: outcomes)
    with pytest.raises(TypeError):
        life.say(life.message(0))
    assert life.queue == [], "nothing of it is committed"


# ---------------------------------------------------------------- joins, the lead, checkpoints


def test_a_worker_that_joins_hears_of_it_when_its_term_is_durable() -> None:
    """Else the worker before it could push to the next server."""
    life = OnDisk()
    life.say(life.message(0))
    assert life.join(0, 2) == []
    assert life.say(life.message(1)) == [], "of the worker before it: fenced, behind the join"
    left = life.sync_all()
    assert [type(each) for _, each in left] == [m.Ack, m.Joined, m.Ack]
    assert left[-1][1].outcome == m.FENCED
    successor = life.successor()
    (dismissed,) = [each for _, each in successor.join(0, 1)]
    assert isinstance(dismissed, m.Dismiss)


def test_the_first_values_are_durable_before_anybody_hears_of_them() -> None:
    """They are a base, and no record."""
    life = OnDisk(begins=False)
    life.join()
    life.sync_all()
    values = m.Initialise(0, 1, np.ones(SIZE, np.float32), np.array([1.0, 2.0]))
    assert life.say(values) == []
    assert life.say(life.message(0)) == []
    assert [bool(commit.write.base) for commit in life.queue] == [True, False]
    assert not life.successor().server.serving.initialised  # type: ignore[union-attr]
    assert [type(each) for _, each in life.sync()] == [m.Joined]
    assert life.successor().w == [1, 1, 1, 1]
    assert acks(life.sync()) == [(0, APPLIED)]
    assert life.successor().w == [2, 1, 1, 1]


@pytest.mark.parametrize("durable", range(5))
def test_operations_of_the_lead_are_made_once_whichever_of_them_a_power_loss_undoes(
    durable: int,
) -> None:
    """Each reads what the one before it has changed, so none may survive without those before."""
    method = registry.load("algorithms", "sandblaster")

    def begun() -> OnDisk:
        life = OnDisk(algorithm=method)
        life.tell(m.Members((0,)))
        life.sync_all()
        return life

    def values(life: OnDisk) -> list[list[float]]:
        assert life.server.serving is not None
        return [table.shard.w.tolist() for table in life.server.serving.tables]

    alone, life = begun(), begun()
    assert life.server.serving is not None
    first, second, *_ = (t.declared.name for t in life.server.serving.tables)
    ops = m.VectorOp(
        1, ("axpy",) * 4, (first, second) * 2, (second, first) * 2, (1.0, 2.0, 3.0, 4.0)
    )  # fmt: skip
    for each in (alone, life):
        each.server.serving.tables[0].shard.storage.fill({"w": np.ones(SIZE, "f4")}, None)  # type: ignore[union-attr]
        each.server.serving.tables[0].commit()  # type: ignore[union-attr]
        each.tell(m.Heard())
        each.sync_all()
    assert [type(each) for _, each in alone.sent(alone.tell(ops))] == []
    assert [type(each) for _, each in alone.sync_all()] == [m.VectorResult]
    life.tell(ops)
    done = 0
    while done < durable and life.queue:
        count = perform_first([commit.write for commit in life.queue])
        del life.queue[:count]
        done += count
    assert done == durable
    successor = OnDisk(life.keeping.copy(), 2, keep=True, algorithm=method)
    successor.tell(ops)
    successor.sync_all()
    assert values(successor) == values(alone)


def test_a_saved_checkpoint_is_reported_behind_the_commits_before_it() -> None:
    """It may hold what is under way; it counts when it is reported."""
    life = OnDisk()
    life.say(life.message(0))
    (save,) = [e for e in life.tell(m.Save(1, ".")) if isinstance(e, SaveArrays)]
    assert save.arrays["w"].tolist() == [1, 0, 0, 0]
    saved = ArraysSaved(1, "digest", 16, "")
    assert life.sent(life.happens(life.server.handle(saved, 0.0))) == []
    assert [type(each) for _, each in life.sync()] == [m.Ack, m.Saved]


def test_a_shard_is_closed_for_good_before_the_last_checkpoint_is_reported() -> None:
    life = OnDisk()
    life.tell(m.Save(1, ".", is_last=True))
    assert life.sent(life.happens(life.server.handle(ArraysSaved(1, "digest", 16, ""), 0.0))) == []
    assert [type(each) for _, each in life.sync_all()] == [m.Saved]
    successor = life.successor()
    successor.say(successor.message(0))
    assert successor.version == 0


# ---------------------------------------------------------------- reports


def reports(effects: list[Any]) -> list[m.Report]:
    sent = [e.message for e in effects if isinstance(e, Send)]
    return [message for message in sent if isinstance(message, m.Report)]


def test_a_report_waits_but_one_that_tells_of_a_slow_disk_does_not() -> None:
    """It repeats the metrics of before: the version that is applied is not durable."""
    life = OnDisk()
    life.now = 10.0
    (before,) = reports(life.server.handle(DeadlineReached(), life.now))
    life.say(life.message(0))
    life.now += SLOW_COMMIT_S
    assert reports(life.happens(life.server.handle(DeadlineReached(), life.now))) == []
    life.now += SLOW_COMMIT_S
    (slow,) = reports(life.happens(life.server.handle(DeadlineReached(), life.now)))
    assert (slow.phase, slow.metrics["commits"]) == (WAITS_FOR_DISK, 1)
    assert slow.metrics["commit_wait_s"] == pytest.approx(2 * SLOW_COMMIT_S)
    assert slow.metrics["version"] == before.metrics["version"] == 0
    life.queue[0].write.perform()
    (late,) = reports(life.server.handle(Committed(life.queue[0].number), life.now))
    assert (late.phase, late.metrics["version"]) == ("serving", 1)


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize("keep_state", [True, False])
def test_a_server_exits_when_its_commits_are_durable_and_their_acks_have_left(
    keep_state: bool,
) -> None:
    life = OnDisk()
    for seq in range(2):
        life.say(life.message(seq))
    life.tell(m.Shutdown("over", keep_state))
    assert life.exit is None
    assert life.say(life.message(2)) == []
    assert life.version == 2, "it takes nothing any more"
    assert acks(life.sync()) == [(0, APPLIED)]
    assert life.exit is None
    assert acks(life.sync()) == [(1, APPLIED)]
    assert life.exit is not None
    assert life.exit.code == 0
    if keep_state:
        assert life.successor().w == [2, 0, 0, 0]


@pytest.mark.parametrize(
    "end",
    [
        Received(COORDINATOR, m.Shutdown("over")),
        StopRequested("SIGTERM"),
        Received(COORDINATOR, m.Dismiss("server-0 has been replaced")),
    ],
    ids=["shutdown", "signal", "dismissed"],
)
def test_a_server_that_ends_still_tells_that_its_disk_is_slow(end: Any) -> None:
    """Else one that waits for a disk that hangs would be taken for dead, and nobody knew why."""
    life = OnDisk()
    life.say(life.message(0))
    life.happens(life.server.handle(end, life.now))
    reported = []
    for _ in range(4):
        life.now = life.server.deadline() or 0.0
        reported += reports(life.happens(life.server.handle(DeadlineReached(), life.now)))
    assert [report.phase for report in reported] == [WAITS_FOR_DISK] * 3
    assert [report.metrics["commit_wait_s"] for report in reported] == [2.0, 3.0, 4.0]
    assert {report.metrics["commit_place"] for report in reported} == {life.keeping.log.where}
    assert life.exit is None
    assert acks(life.sync()) == [(0, APPLIED)]
    assert life.exit is not None
    assert life.server.deadline() is None


def test_a_server_that_is_stopped_writes_its_last_record_behind_its_commits() -> None:
    life = OnDisk()
    life.say(life.message(0))
    life.happens(life.server.handle(StopRequested("SIGTERM"), 0.0))
    (journal,) = life.keeping.log.read_journal(life.keeping.log.current)
    life.sync()
    assert life.exit is not None
    (written,) = life.keeping.log.read_journal(life.keeping.log.current)
    assert len(written) > len(journal) + len(life.message(0).delta.arrays[0].tobytes())
    assert life.successor().w == [1, 0, 0, 0]


def test_an_idle_server_is_stopped_at_once() -> None:
    life = OnDisk()
    life.happens(life.server.handle(StopRequested("SIGTERM"), 0.0))
    assert life.exit is not None


def test_a_server_that_was_replaced_exits_behind_its_commits_and_changes_nothing_more() -> None:
    life = OnDisk()
    life.say(life.message(0))
    life.tell(m.Dismiss("server-0 has been replaced"))
    life.say(life.message(1))
    assert (life.exit, life.version) == (None, 1)
    assert acks(life.sync()) == [(0, APPLIED)]
    assert life.exit is not None
    assert life.exit.code == EXIT_FENCED


def test_an_update_that_diverges_is_in_no_commit_and_those_before_it_are_acknowledged() -> None:
    life = OnDisk()
    life.tell(m.ChangeSettings(1, {"lr": 1e32}))
    life.say(life.message(0, (1e-30, 0, 0, 0)))
    life.tell(life.message(1, (1e8, 0, 0, 0)), b"worker")
    assert life.exit is None
    left = life.sync_all()
    assert acks(left) == [(0, APPLIED)]
    assert [each.fatal for _, each in left if isinstance(each, m.Failed)] == [True]
    assert life.exit is not None
    assert life.exit.code == 1
    assert life.successor().version == 1


# ---------------------------------------------------------------- the log


class FullDisk:
    """A log whose bases find no room."""

    where = "here"

    def __init__(self) -> None:
        self.appended: list[int] = []

    def append(self, parts: list[bytes]) -> None:
        self.appended.append(b"".join(parts).count(b"record"))

    def begin(self, number: int, parts: list[bytes]) -> None:
        raise NoRoom("no space left on device")


def write(
    log: Any, record: bytes = b"dlJ1 record", base: bytes = b"", *, in_order: bool = False
) -> LogWrite:
    return LogWrite(log, 1, record, base, no_point, in_order)


def test_one_sync_of_each_log_covers_the_records_of_several() -> None:
    log, other = FullDisk(), FullDisk()
    assert perform_first([write(log), write(other), write(log), write(log)]) == 4
    assert (log.appended, other.appended) == ([3], [1])


def test_a_commit_that_depends_on_those_of_other_tables_is_written_behind_them() -> None:
    log, other = FullDisk(), FullDisk()
    writes = [write(log), write(other), write(log, in_order=True), write(other)]
    for done in ([[1], [1]], [[1, 1], [1]], [[1, 1], [1, 1]]):
        del writes[: perform_first(writes)]
        assert [log.appended, other.appended] == done
    assert not writes


def test_records_behind_a_new_base_are_not_of_the_journal_before_it() -> None:
    log = FullDisk()
    assert perform_first([write(log), write(log, base=b"base"), write(log)]) == 2
    assert log.appended == [2], "without room for the base the journal goes on"


def test_a_commit_that_only_a_base_has_needs_the_room() -> None:
    with pytest.raises(NoRoom):
        perform_first([write(FullDisk(), record=b"", base=b"base"), write(FullDisk())])


def test_a_commit_is_a_copy_of_what_the_shard_was() -> None:
    """A base, too: the updates behind it are applied before it is written."""
    life = OnDisk()
    life.server.serving.shard.storage._rotate_at_bytes = 0  # type: ignore[union-attr]
    for seq in range(3):
        message = life.message(seq)
        life.say(message)
        message.delta.arrays[0][:] = np.nan  # Its memory is given back.
    for version in range(1, 4):
        life.sync()
        assert life.successor().w == [version, 0, 0, 0]


def test_no_journal_is_started_over_while_a_base_of_its_table_is_under_way() -> None:
    """A base is a copy of everything: a disk slower than the pushes would fill the memory."""
    life = OnDisk()
    life.server.serving.shard.storage._rotate_at_bytes = 0  # type: ignore[union-attr]

    def bases(first: int, count: int) -> list[bool]:
        for seq in range(first, first + count):
            life.say(life.message(seq))
        return [bool(commit.write.base) for commit in life.queue]

    assert bases(0, 3) == [True, False, False]
    life.sync()
    assert bases(3, 2) == [False, False, True, False], "it was due, and is made up for"
    life.sync_all()
    assert life.successor().w == [5, 0, 0, 0]
    assert bases(5, 1) == [True]
