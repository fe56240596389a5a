"""What a driven method has come to is played back, and nothing is done twice."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest

from dlctl.algorithms.base import (
    BatchRequest,
    Change,
    DriveSnapshot,
    Lead,
    Sum,
    Table,
    VectorRequest,
)
from dlctl.roles.coordinator.pools.portions import PortionPool
from dlctl.roles.coordinator.training.driven import Driven, DrivenMethod
from dlctl.roles.protocol.context import Context
from dlctl.wire import messages as m
from dlctl.wire.machine import Send

SERVERS = 2
TABLES = [Table(name="w", rule="lead"), Table(name="g", rule="lead")]
NORM = VectorRequest((Change("copy", "w", "g", 2.0),), (Sum("dot", "g", "g"), Sum("norm1", "g")))


@dataclass(slots=True)
class Counting(Lead):
    """Batches and norms in turn; a snapshot after each second round."""

    portions = "batch"

    rounds: int = 0
    seen: tuple[float, ...] = ()

    def state(self):
        return {"rounds": self.rounds, "seen": list(self.seen)}

    def resume(self, state):
        self.rounds, self.seen = state["rounds"], tuple(state["seen"])

    def drive(self):
        while self.rounds < 4:
            losses, samples = yield BatchRequest()
            dot, norm = yield NORM
            self.seen += (losses, samples, dot, norm)
            self.rounds += 1
            if self.rounds % 2 == 0:
                yield DriveSnapshot()
        return "four rounds"


class Driver:
    """One coordinator with the method, and what it has sent."""

    def __init__(self, before: Driver | None = None, *, portion: int = 10, lead=None) -> None:
        self.context = Context(resend_s=1.0)
        self.lead = lead or Counting(None)
        self.pool = PortionPool(20, portion, limit=0)
        journal = {}
        if before is not None:
            self.lead.resume(json.loads(json.dumps(before.driven.snapshot)))
            journal = json.loads(json.dumps(before.driven.to_json()))
            self.pool.restore(before.pool.to_json())
        self.driven = DrivenMethod(self.context, self.lead, self.pool, TABLES, SERVERS, journal)
        self.driven.advance(0.0)

    def sent(self) -> list[m.VectorOp]:
        effects = self.context.clear()
        return [e.message for e in effects if isinstance(e, Send)]

    def answers(self, number: int, *partials: tuple[float, ...]) -> None:
        for shard, sums in enumerate(partials):
            self.driven.on_result(m.VectorResult(number, shard, number, sums), 0.0)

    def portion(self, loss: float) -> None:
        taken = self.pool.take(0, 0.0)
        assert taken is not None
        self.pool.finish(taken.data_epoch, taken.portion, 0.0)
        self.driven.on_portion(
            m.PortionDone(0, 1, taken.data_epoch, taken.portion, 1, taken.stop - taken.start, loss)
        )

    def one_round(self, number: int) -> None:
        self.portion(1.0)
        self.portion(2.0)
        self.driven.advance(0.0)
        self.answers(number, (1.0, 2.0), (10.0, 20.0))
        self.driven.advance(0.0)


def test_a_sum_is_that_of_all_shards_and_a_batch_that_of_its_portions():
    driver = Driver()
    assert driver.sent() == []
    assert driver.pool.limit == 2
    driver.portion(1.0)
    driver.portion(2.0)
    assert driver.sent() == [], "nothing begins by itself: a checkpoint may be under way"
    driver.driven.advance(0.0)
    op = m.VectorOp(1, ("copy", "dot", "norm1"), ("w", "g", "g"), ("g", "g", ""), (2.0, 0.0, 0.0))
    assert driver.sent() == [op] * SERVERS
    driver.answers(1, (1.0, 2.0), (10.0, 20.0))
    assert driver.lead.seen == (3.0, 20, 11.0, 22.0)


def test_answers_that_are_late_repeated_or_of_the_wrong_length_count_for_nothing():
    driver = Driver()
    driver.one_round(1)
    driver.portion(1.0)
    driver.portion(1.0)
    driver.driven.advance(0.0)
    driver.answers(1, (5.0, 5.0), (5.0, 5.0))
    driver.driven.on_result(m.VectorResult(2, 0, 2, (5.0,)), 0.0)
    driver.driven.on_result(m.VectorResult(2, 7, 2, (5.0, 5.0)), 0.0)
    for _ in range(3):
        driver.driven.on_result(m.VectorResult(2, 0, 2, (1.0, 1.0)), 0.0)
    assert driver.lead.rounds == 1
    driver.driven.on_result(m.VectorResult(2, 1, 2, (1.0, 1.0)), 0.0)
    assert driver.lead.seen[-2:] == (2.0, 2.0)


@pytest.mark.parametrize("rounds", [0, 1, 2, 3])
@pytest.mark.parametrize("where", ["before a portion", "in a batch", "in an operation"])
def test_who_comes_next_goes_on_with_the_request_that_there_was(rounds, where):
    first, alone = Driver(), Driver()
    for number in range(4):
        alone.one_round(number + 1)
    for number in range(rounds):
        first.one_round(number + 1)
    if where != "before a portion":
        first.portion(1.0)
    if where == "in an operation":
        first.portion(2.0)
        first.driven.advance(0.0)
    first.sent()
    second = Driver(first)
    assert [op.number for op in second.sent()] == [rounds + 1] * 2 * (where == "in an operation")
    if where == "before a portion":
        second.portion(1.0)
    if where != "in an operation":
        second.portion(2.0)
        second.driven.advance(0.0)
    second.answers(rounds + 1, (1.0, 2.0), (10.0, 20.0))
    second.driven.advance(0.0)
    for number in range(rounds + 1, 4):
        second.one_round(number + 1)
    assert second.lead.seen == alone.lead.seen
    assert second.driven.over == alone.driven.over == "four rounds"


def test_with_other_portions_the_batch_begins_anew_under_a_greater_number():
    first = Driver()
    first.one_round(1)
    first.portion(7.0)
    second = Driver(first, portion=7)
    assert second.pool.take(0, 0.0).data_epoch == 2, "batch 1 had begun, and is given up"
    second.pool.give_back(0)
    third = Driver(second, portion=7)
    assert third.pool.take(0, 0.0).data_epoch == 2, "who takes its place then knows of that"
    third.pool.give_back(0)
    for _ in range(3):
        third.portion(1.0)
    assert third.driven.to_json()["results"][-1][1] == ["3.0", "20"]


def test_a_portion_without_a_loss_makes_the_batch_infinite():
    driver = Driver()
    driver.portion(math.nan)
    again = Driver(driver)
    again.portion(2.0)
    ((_, result),) = again.driven.to_json()["results"]
    assert result == ["inf", "20"]


class Broken(Counting):
    """Names a table that there is not."""

    def drive(self):
        yield BatchRequest()
        yield VectorRequest((Change("copy", "w", "nowhere"),))


class Raising(Counting):
    def drive(self):
        yield BatchRequest()
        raise ZeroDivisionError("by the loss")


@pytest.mark.parametrize(
    ("lead", "what"),
    [(Broken(None), "y='nowhere'"), (Raising(None), "ZeroDivisionError: by the loss")],
)
def test_a_mistake_of_the_method_fails_the_run_and_no_coordinator_dies_of_it(lead, what):
    first = Driver(lead=lead)
    first.portion(1.0)
    first.portion(2.0)
    assert what in first.driven.failed
    assert what in Driver(first, lead=type(lead)(None)).driven.failed, "nor the next one"
    first.driven.advance(0.0)
    assert first.sent() == []


class Other(Counting):
    """The same method with other options: it asks for something else."""

    def drive(self):
        yield VectorRequest((), (Sum("dot", "w", "w"), Sum("dot", "g", "g")))
        yield BatchRequest()


def test_a_result_is_not_taken_for_the_answer_to_another_question():
    first = Driver()
    first.one_round(1)
    second = Driver(first, lead=Other(None))
    assert "options" in second.driven.failed
    assert second.sent() == []


def test_an_operation_that_takes_long_is_told_of_with_whom_it_waits_for():
    driver = Driver()
    driver.portion(1.0)
    assert driver.driven.waits_for(100.0) == "", "a batch may take as long as it takes"
    driver.portion(2.0)
    driver.driven.advance(0.0)
    driver.driven.on_result(m.VectorResult(1, 0, 1, (1.0, 2.0)), 0.0)
    assert driver.driven.waits_for(0.5) == ""
    assert driver.driven.waits_for(2.0).startswith("server-1 (")


def test_a_coordinator_that_has_lost_what_it_wrote_says_so_and_does_not_wait_for_ever():
    driver = Driver()
    driver.portion(1.0)
    driver.portion(2.0)
    driver.driven.advance(0.0)
    driver.driven.on_result(m.VectorResult(1, 0, 9, ()), 0.0)
    assert "operation 9" in driver.driven.failed


def test_before_the_workers_are_released_a_method_has_only_what_was_saved_of_it():
    context, lead = Context(resend_s=1.0), Counting(None, rounds=1)
    driven = Driven(context, lead, TABLES, SERVERS)
    driven.journal = {"number": 3}
    driven.begin()
    assert not driven.advance(0.0), "the dataset is not known"
    assert driven.journaled() == ({"rounds": 1, "seen": []}, {"number": 3})
    assert (driven.over, driven.failed, driven.waits_for(9.0)) == ("", "", "")


def test_a_method_begins_with_a_batch_of_its_dataset_and_goes_on_with_what_is_done_of_it():
    driven = Driven(Context(resend_s=1.0), Counting(None), TABLES, SERVERS)
    pool = driven.supply(20, 10)
    pool.limit = 100
    driven.begin()
    assert pool.take(0, 0.0) is None, "no batch was asked for yet"
    assert driven.advance(0.0)
    for _ in range(2):
        taken = pool.take(0, 0.0)
        pool.finish(taken.data_epoch, taken.portion, 0.0)
        driven.on_portion(m.PortionDone(0, 1, *taken[:2], 1, 10, 1.5))
    state, journal = driven.journaled()
    assert (state, journal["results"][0][1]) == ({"rounds": 0, "seen": []}, ["3.0", "20"])
    assert pool.take(0, 0.0) is None, "the next batch begins when its turn comes"
