"""Groups in virtual time: the service of several workers, the coordinator's groups, and sums that
fail for some members and not for others. All who live have the same results in the same order.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlctl.algorithms.needs import Collective, Summed, passed_on
from dlctl.errors import DlctlError, RemoteProtocolError
from dlctl.roles.coordinator.records import EventContext
from dlctl.roles.coordinator.supervision.groups import LOST, Groups
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.protocol.effects import (
    GroupJoined,
    Reduce,
    Reduced,
)
from dlctl.roles.worker.services.collecting import Collecting
from dlctl.roles.worker.services.sums import NEW, Claim, ModelLost, Row, SumRecords, plan_of, row_of
from dlctl.roles.worker.shard_client import Identity
from dlctl.sim import group as sim_group
from dlctl.sim.process import Process
from dlctl.sim.timeline import Timeline
from dlctl.wire import messages as m
from dlctl.wire.machine import DeadlineReached, Effect, Event, Received, Send

SILENT_S = 5.0
STEP_S = 0.1
DELAY_S = 0.002


class _Worker:
    """Makes one sum after the other: of its slot's bit, so a sum tells who is in it."""

    def __init__(self, house: House, slot: int, term: int) -> None:
        self.house, self.slot, self.term = house, slot, term
        self.context = Context(1.0)
        identity = Identity("run", slot, term, b"")
        self.service = Collecting(self.context, f"worker-{slot}", identity, SILENT_S)
        self.results: list[Summed] = []
        self.step = 0
        self.computes_until = 0.0
        self._waits = False

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(_, m.Group() as message):
                self.service.on_group(message, now)
            case DeadlineReached():
                self.context.do(*self.context.retries.due(now))
            case _:
                self.service.on_event(event, now)  # type: ignore[arg-type]
        self.work(now)
        return self.context.clear()

    def work(self, now: float) -> None:
        if not self._waits and now >= self.computes_until:
            self._waits = True
            self.service.begin(Collective(vector=self.vector(), step=self.step), now)
        if self._waits:
            done, summed = self.service.poll(now)
            if done:
                assert summed is not None
                self.results.append(summed)
                self.step, self._waits = summed.step + 1, False
                self.computes_until = now + STEP_S

    def vector(self) -> Any:
        return np.array([2.0**self.slot], np.float32)

    def deadline(self) -> float | None:
        times = [self.context.retries.deadline()]
        times += [self.service.deadline()] if self._waits else [self.computes_until]
        return min((t for t in times if t is not None), default=None)


class House:
    """Workers, each with the simulator's driver of groups, and the coordinator's part."""

    def __init__(self, slots: int, torn: float = 0.0, seed: int = 0) -> None:
        self.timeline = Timeline()
        self.sums = sim_group.SimGroups(np.random.default_rng(seed), torn)
        self.drained: set[int] = set()
        self.processes: dict[int, Process] = {}
        self.events: list[str] = []
        self.context = EventContext(1.0)
        self.context.event = lambda kind, who, text: self.events.append(text)  # type: ignore
        members = SimpleNamespace(
            live_slots=self._live, of_role=lambda _: self._daemons(), worker=self._worker,
            get=lambda name: next((d for d in self._daemons() if d.name == name), None),
            follow=lambda *_: SimpleNamespace(take=self._daemons), select=lambda *_: (),
        )  # fmt: skip
        self.run = SimpleNamespace(
            algorithm=SimpleNamespace(shape=SimpleNamespace(links={"group"})), context=self.context,
            job=SimpleNamespace(timeouts=SimpleNamespace(silent_s=SILENT_S)), members=members,
            state="running", shutdown=None,
        )  # fmt: skip
        self.ended: list[str] = []
        self.steps = 0
        self.loses = 0
        """So many words that the model is lost do not come."""
        control = SimpleNamespace(end=self._end)
        self.groups = Groups(self.run, control, lambda: self.steps)  # type: ignore[arg-type]
        for slot in range(slots):
            self.start(slot, 1)

    def start(self, slot: int, term: int) -> None:
        process = Process(f"worker-{slot}", term, self.timeline, self, 0.0, lambda _: None)  # type: ignore
        process.machine = _Worker(self, slot, term)
        sim_group.GroupDriver(process, self.sums)
        self.processes[slot] = process
        process.post(DeadlineReached())

    def worker(self, slot: int) -> _Worker:
        return self.processes[slot].machine  # type: ignore[return-value]

    def _daemons(self) -> list[Any]:
        return [
            SimpleNamespace(
                name=f"worker-{slot}",
                index=slot,
                term=process.incarnation,
                alive=process.alive,
                host=f"host-{slot}",
                out_of_touch=False,
                metrics=self.metrics(process),
            )
            for slot, process in sorted(self.processes.items())
        ]

    @staticmethod
    def metrics(process: Process) -> dict[str, Any]:
        service = process.machine.service  # type: ignore[attr-defined]
        return {"group": [service.generation, len(service.slots), service.is_made]}

    def _end(self, state: str, reason: str, now: float, *, at_once: bool) -> None:
        assert (state, at_once) == ("failed", True)
        self.ended.append(reason)
        self.run.shutdown = "begun"

    def _live(self) -> tuple[int, ...]:
        return tuple(d.index for d in self._daemons() if d.alive and d.index not in self.drained)

    def _worker(self, slot: int, term: int) -> Any:
        here = [d for d in self._daemons() if (d.index, d.term) == (slot, term) and d.alive]
        return here[0] if here else None

    # ------------------------------------------------------------ the network

    def send(self, process: Process, _: str, message: m.Message) -> None:
        self.timeline.after(DELAY_S, lambda: self._hear(message))

    def forget(self, process: Process) -> None:
        pass

    def _hear(self, message: m.Message) -> None:
        if isinstance(message, m.GroupNoted):
            self.groups.on_noted(b"", message, self.timeline.now)
        elif isinstance(message, m.GroupBroken) and message.why == m.MODEL_LOST and self.loses:
            self.loses -= 1
        elif isinstance(message, m.GroupBroken):
            self.groups.on_broken(b"", message, self.timeline.now)
        self.look()

    def look(self) -> None:
        now = self.timeline.now
        self.context.do(*self.context.retries.due(now))
        self.groups.advance(now)
        for effect in self.context.clear():
            assert isinstance(effect, Send)
            process = self.processes[int(str(effect.peer).partition("-")[2])]
            self.timeline.after(
                DELAY_S, lambda p=process, e=effect: p.deliver(COORDINATOR, e.message)
            )

    def go(self, for_s: float) -> None:
        until = self.timeline.now + for_s
        while self.timeline.now < until:
            soon = min(until, self.timeline.now + 0.02)
            while self.timeline.step(soon):
                pass
            self.timeline.now = soon
            self.look()

    # ------------------------------------------------------------ what is promised

    def check(self) -> None:
        """All results of who lives are those of the others, from the first that it was in."""
        alive = [self.worker(slot) for slot, p in self.processes.items() if p.alive]
        by_step: dict[int, tuple[float, ...]] = {}
        for worker in alive:
            steps = [summed.step for summed in worker.results]
            assert steps == [*range(steps[0], steps[0] + len(steps))] if steps else True, steps
            for summed in worker.results:
                row = (float(summed.vector[0]), summed.weight, summed.members, summed.joined)
                assert by_step.setdefault(summed.step, row) == row, (worker.slot, summed)
                # Every slot has a bit of its own: so many are in it as have been counted.
                assert int(summed.vector[0]).bit_count() == summed.weight

    def last(self, slot: int = 0) -> Summed:
        return self.worker(slot).results[-1]


def test_all_have_the_same_sums():
    house = House(3)
    house.go(2.0)
    house.check()
    assert house.last().vector == 7.0
    assert house.last().weight == house.last().members == 3
    assert len(house.worker(0).results) > 5


@pytest.mark.parametrize("after_s", np.linspace(1.0, 1.2, 12))
def test_a_dead_member_is_in_no_later_sum_whenever_it_dies(after_s):
    house = House(3, seed=int(after_s * 1000))
    house.go(float(after_s))
    before = len(house.worker(0).results)
    house.processes[1].end(-9)
    house.go(2.0)
    house.check()
    assert house.last().vector == 5.0
    assert (house.last().weight, house.last().members) == (2.0, 2)
    assert len(house.worker(0).results) > before + 5


@pytest.mark.parametrize("seed", range(12))
def test_sums_that_some_have_and_others_do_not(seed):
    """It counts for all of them or for none."""
    house = House(3, torn=0.3, seed=seed)
    house.go(20.0)
    house.check()
    assert house.groups.generation > 5
    counts = {len(house.worker(slot).results) for slot in range(3)}
    assert max(counts) - min(counts) <= 1
    assert max(counts) > 5


@pytest.mark.parametrize("seed", range(6))
def test_members_that_die_and_are_replaced_while_sums_are_torn(seed):
    house, rng = House(4, torn=0.15, seed=seed), np.random.default_rng(seed)
    for term in range(2, 6):
        house.go(3.0 + float(rng.random()))
        slot = int(rng.integers(1, 4))
        house.processes[slot].end(-9)
        house.go(float(rng.random()))
        house.check()
        house.start(slot, house.processes[slot].incarnation + 1)
        assert term
    house.go(8.0)
    house.check()
    assert house.last().vector == 15.0


def test_who_computes_for_long_is_waited_for_and_named():
    house = House(3)
    house.go(1.0)
    generation = house.groups.generation
    house.worker(2).computes_until = house.timeline.now + 6 * SILENT_S
    house.go(3 * SILENT_S)
    assert house.worker(0).service.phase().whom == ("worker-2",)
    house.go(4 * SILENT_S)
    house.check()
    assert house.groups.generation == generation
    assert house.last().vector == 7.0


def test_who_hangs_in_a_sum_is_left_out_and_comes_back():
    house = House(3)
    house.go(1.0)
    house.processes[1].freeze()
    house.start(3, 1)  # Somebody joins, so a new generation is needed.
    house.go(3 * SILENT_S)
    house.check()
    assert house.last().vector == 13.0
    assert house.groups.left_out == {(1, 1)}
    house.processes[1].thaw()
    house.go(SILENT_S)
    # It has missed sums that count: it notices, and its process ends.
    assert not house.processes[1].alive
    house.go(SILENT_S)
    house.check()
    assert house.last().vector == 13.0


def test_a_joiner_learns_the_step_and_gives_nothing_at_first():
    house = House(2)
    house.go(1.0)
    house.start(2, 1)
    house.go(2.0)
    house.check()
    first = house.worker(2).results[0]
    assert (first.vector[0], first.weight, first.joined, first.is_counted) == (3.0, 2.0, 1, False)
    assert first.step > 0
    assert first.first == 0
    assert house.last(2).vector == 7.0


def test_a_drained_member_is_not_waited_for():
    house = House(3)
    house.go(1.0)
    house.drained.add(2)
    house.worker(2).computes_until = 1e9
    house.go(1.0)
    house.check()
    assert house.last().vector == 3.0


def test_a_driver_that_does_not_answer_is_given_up():
    context = Context(1.0)
    service = Collecting(context, "worker-0", Identity("run", 0, 1, b""), SILENT_S)
    service.on_group(m.Group(1, (0,), "here:1", True), 0.0)
    service.on_event(GroupJoined(1, 0, None), 0.1)
    service.begin(Collective(vector=np.ones(1, np.float32)), 0.1)
    assert service.poll(0.1) == (False, None)
    due = service.deadline()
    assert due is not None
    context.clear()
    service.poll(due)
    sent = [e.message for e in context.clear() if isinstance(e, Send)]
    assert [type(message) for message in sent] == [m.GroupBroken]


# ---------------------------------------------------------------- nobody has the model any more


def without_model(house: House) -> None:
    """Something has been trained; then all members die, and others take their places."""
    house.go(1.0)
    house.steps = 1
    for slot, process in list(house.processes.items()):
        process.end(-9)
        house.start(slot, 2)


def test_a_group_that_has_lost_its_model_ends_the_run_once_though_its_words_are_lost():
    house = House(2)
    house.loses = 5
    without_model(house)
    house.go(20.0)
    assert house.ended == [LOST]
    assert house.loses == 0
    assert not house.worker(0).results
    assert not house.worker(1).results
    assert "dlctl recover" in LOST


@pytest.mark.parametrize("slots", [2, 3])
def test_one_member_that_says_that_the_model_is_lost_does_not_end_the_run(slots: int):
    house = House(slots)
    for _ in range(4):
        house.go(1.0)
        house.steps = 1
        broken = m.GroupBroken(1, 1, house.groups.generation, "lost", m.MODEL_LOST)
        house.groups.on_broken(b"", broken, house.timeline.now)
    before = len(house.worker(0).results)
    house.go(2.0)
    house.check()
    assert not house.ended
    assert len(house.worker(0).results) > before


@pytest.mark.parametrize(
    ("slot", "store"),
    [(1, "host-1:4711"), (0, "host-0"), (0, "host-0:port"), (0, "a b:1"), (0, "host-0:4711\n")],
)
def test_a_rendezvous_of_another_member_or_one_that_nobody_can_read_is_refused(slot, store):
    house = House(2)
    house.look()
    said = m.GroupNoted(f"worker-{slot}", house.groups.generation, store)
    with pytest.raises(RemoteProtocolError):
        house.groups.on_noted(b"", said, 0.0)
    house.go(1.0)
    house.check()
    assert house.last().vector == 3.0


def test_all_may_die_before_anything_is_trained():
    house = House(2)
    house.go(0.01)
    for slot, process in list(house.processes.items()):
        process.end(-9)
        house.start(slot, 2)
    house.go(2.0)
    house.check()
    assert not house.ended
    assert house.last().vector == 3.0


def test_a_member_that_hangs_and_alone_has_the_model_is_waited_for():
    house = House(1)
    house.go(1.0)
    house.steps = 1
    house.processes[0].freeze()
    house.start(1, 1)
    house.go(4 * SILENT_S)
    assert house.groups.left_out == {(0, 1)}
    assert not house.ended
    house.processes[0].thaw()
    house.go(3 * SILENT_S)
    house.check()
    assert not house.ended
    assert house.last(1).vector == 3.0


def test_if_that_one_dies_the_run_ends():
    house = House(1)
    house.go(1.0)
    house.steps = 1
    house.processes[0].freeze()
    house.start(1, 1)
    house.go(3 * SILENT_S)
    house.processes[0].end(-9)
    house.go(SILENT_S)
    assert house.ended == [LOST]


def test_who_comes_before_the_first_sum_of_a_run_that_goes_on_is_given_the_model():
    """Its own is the initial one, and that of the others is of a checkpoint."""
    house = House(1)
    house.steps = 1
    house.worker(0).service = Collecting(
        house.worker(0).context, "worker-0", house.worker(0).service.identity, SILENT_S, begins=True
    )
    house.start(1, 1)
    house.go(1.0)
    first = house.worker(1).results[0]
    assert (first.joined, first.is_counted, first.first, first.vector[0]) == (1, False, 0, 1.0)
    assert not house.ended


def test_members_at_work_on_a_model_of_the_servers_need_nobody_who_has_it():
    service = Collecting(
        Context(1.0), "worker-0", Identity("run", 0, 2, b""), SILENT_S, hands_on=False
    )
    service.on_group(m.Group(1, (0,), "here:1", False), 0.0)
    service.on_event(GroupJoined(1, 0, None), 0.1)
    service.begin(Collective(vector=np.ones(1, np.float32)), 0.1)
    service.poll(0.1)
    reduce = next(e for e in service.context.clear() if isinstance(e, Reduce))
    assert plan_of([row_of(reduce)]).weights == (1.0,)


# ---------------------------------------------------------------- members that find no way


class Apart:
    """A network in which two members do not reach each other; the coordinator reaches both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *slots: int) -> None:
        self.names = [f"worker-{slot}" for slot in slots]
        self.is_on = True
        honest = sim_group.GroupDriver._all_are_there

        def all_are_there(driver: sim_group.GroupDriver, group: Any) -> None:
            found = [d for d in group.members.values() if d.process.name in self.names]
            if not self.is_on or len(found) < len(self.names):
                honest(driver, group)
                return
            for one in found:
                one._fail_later(group, SILENT_S, "no way from a to b:4711", m.UNMADE)
            for other in group.members.values():
                if other not in found:
                    other._soon(
                        group, lambda d=other: d.process.post(GroupJoined(group.number, 0, None))
                    )

        monkeypatch.setattr(sim_group.GroupDriver, "_all_are_there", all_are_there)


def test_two_that_do_not_reach_each_other_end_the_run_with_both_hosts_and_what_to_look_at(
    monkeypatch: pytest.MonkeyPatch,
):
    Apart(monkeypatch, 0, 2)
    house = House(3)
    house.go(2 * SILENT_S)
    phase = house.worker(0).service.phase()
    assert "b:4711" in phase.what
    assert phase.whom == ("worker-1", "worker-2")
    assert not house.ended
    house.go(4 * SILENT_S)
    (reason,) = house.ended
    for words in ("worker-0 on host-0: no way from a to b:4711", "worker-2 on host-2", "firewall"):
        assert words in reason
    assert "host-1" not in reason


def test_who_finds_a_way_in_time_goes_on_and_begins_to_count_anew(
    monkeypatch: pytest.MonkeyPatch,
):
    apart = Apart(monkeypatch, 0, 1)
    house = House(2)
    for _ in range(3):
        apart.is_on = True
        house.start(2, house.processes[2].incarnation + 1 if 2 in house.processes else 1)
        house.go(3 * SILENT_S)
        apart.is_on = False
        house.go(3 * SILENT_S)
        house.check()
        assert house.worker(0).service.phase().what in ("summing", "waiting for its group")
        house.processes[2].end(-9)
        house.go(1.0)
    assert not house.ended
    assert house.last().vector == 3.0


# ---------------------------------------------------------------- who leaves


def test_who_leaves_joins_no_later_group_and_answers():
    house = House(2)
    house.go(1.0)
    leaver = house.worker(1)
    leaver.service.cancel()
    leaver.computes_until = 1e9
    leaver._waits = False
    house.start(2, 1)  # The coordinator has not heard that it leaves, and makes a group with it.
    house.go(0.2)
    assert house.groups.members == ((0, 1), (1, 1), (2, 1))
    assert not leaver.service.is_made
    house.drained.add(1)
    house.go(1.0)
    house.check()
    assert house.last().vector == 5.0


# ---------------------------------------------------------------- what members conclude


def _result(generation: int) -> Reduced:
    return Reduced(generation, 0, np.zeros(1, np.float32), 1.0, 2, 0, 0, True, (0,))


def test_a_sum_that_one_was_handed_counts_for_all():
    one, other = SumRecords(5, 1), SumRecords(5, 1)
    for records in (one, other):
        records.keep(_result(1))
    one.deliver()
    claims = [one.claim(), other.claim()]
    assert (one.agree(claims).number, one.agree(claims).result) == (6, None)
    agreed = other.agree(claims)
    assert agreed.number == 6
    assert agreed.result is not None
    assert agreed.result.number == 6


def test_a_sum_that_all_have_counts_also_for_who_is_new():
    one, other, new = SumRecords(5, 1), SumRecords(5, 1), SumRecords()
    for records in (one, other):
        records.keep(_result(1))
    claims = [one.claim(), other.claim(), new.claim()]
    assert [records.agree(claims).number for records in (one, other, new)] == [6, 6, 6]
    assert one.claim() == new.claim() == Claim(6, 1, 0)


def test_a_sum_that_not_all_have_is_made_again():
    one, other = SumRecords(5, 1), SumRecords(5, 1)
    one.keep(_result(1))
    claims = [one.claim(), other.claim()]
    assert [records.agree(claims) for records in (one, other)] == [(5, None)] * 2
    assert one.kept is None


@pytest.mark.parametrize("claim", [Claim(5, 1, 0), Claim(5, 1, 1), Claim(4, 1, 1), Claim(6, 1, 0)])
def test_who_has_missed_a_sum_or_has_another_one_is_not_of_the_group_any_more(claim):
    kept = None if not claim.kept_in else _result(claim.kept_in)
    behind, group = SumRecords(claim.finished, claim.finished_in, kept), Claim(6, 2, 0)
    with pytest.raises(DlctlError):
        behind.agree([group, group, claim])
    assert SumRecords(6, 2).agree([group, claim]).number == 6


def test_nobody_begins_anew_when_all_that_had_the_model_are_gone():
    rows = [Row(0, 1, 1.0, 0, True, False), Row(1, 1, 1.0, 3, False, True)]
    with pytest.raises(ModelLost):
        plan_of(rows)
    assert plan_of([*rows, Row(2, 1, 1.0, 3, False, False)]).current == (2,)
    assert SumRecords().claim().finished == NEW


def test_what_is_handed_on_is_from_one_that_has_it_though_the_giver_dies_and_more_join():
    def summed(value: float, weight: float, joined: int, first: int) -> Summed:
        return Summed(np.array([value], np.float32), weight, 3, 9, False, joined, (first,))

    asked = passed_on(np.zeros(1, np.float32), 0, 9, summed(0, 2, joined=1, first=1))
    needs = [next(asked)]
    needs.append(asked.send(summed(0, 0, joined=0, first=2)))  # the giver was worker-1, and died
    needs.append(asked.send(summed(4, 1, joined=1, first=0)))  # one more has joined
    with pytest.raises(StopIteration) as end:
        asked.send(summed(4, 1, joined=0, first=0))
    assert [need.weight for need in needs] == [0.0, 0.0, 1.0]  # type: ignore[attr-defined]
    assert needs[-1].vector == 4.0  # type: ignore[attr-defined]
    assert end.value.value == (np.float32(4.0), 9)
