"""What the services make of needs: the messages that go out, and what a method is resumed with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import OWN_LR
from replica_of_needs import CELLS, ONES, READ, SERVERS, SIZE, TWO_TABLES, Replica, replica

from dlctl.algorithms.base import (
    Shape,
)
from dlctl.algorithms.needs import (
    Ask,
    Done,
    Engine,
    Gradient,
    Need,
    NextBatch,
    NextData,
    OwnState,
    Read,
    Receipt,
    Settle,
    Step,
    View,
    Write,
)
from dlctl.roles.protocol.effects import (
    Compute,
    Computed,
    EngineRan,
    FailedSample,
    RunEngine,
)
from dlctl.roles.worker.shard_client import WINDOW
from dlctl.wire import messages as m
from dlctl.wire.messages import APPLIED, BUFFERED, DUPLICATE, HELD, LATE, REFUSED

# ---------------------------------------------------------------- reads


def test_a_read_is_in_the_model_when_all_shards_have_answered() -> None:
    at = replica(READ)
    first, second = at.of(m.Fetch)
    at.answer(0, first, 1.0)
    assert at.log == []
    at.answer(1, second, 2.0)
    assert at.log == [View(0, 0)]
    assert at.model.tolist() == [1, 1, 1, 2, 2, 2]


def test_the_clocks_of_a_view_are_those_of_the_replies_and_no_versions() -> None:
    at = replica(READ, READ)
    fetches = at.of(m.Fetch)
    at.answer(0, fetches[0], 0.0, clock=7, version=100)
    at.answer(1, fetches[1], 0.0, clock=4, version=200)
    assert at.log == [View(4, 7)]
    assert at.side.view == View(4, 7)
    at.answer_all(at.of(m.Fetch), 0.0, clock=9)
    assert at.log[1:] == [View(9, 9)]


def test_a_read_that_is_not_waited_for_goes_on_at_once_and_comes_between_two_steps() -> None:
    at = replica(READ, NextData(), Read(wait=False), Gradient(), NextData())
    at.answer_all(at.of(m.Fetch), 1.0)
    at.lease(2)
    assert at.log[2] is None
    assert isinstance(at.need, Gradient)
    at.answer_all(at.of(m.Fetch), 2.0, clock=3)
    assert at.model.tolist() == [1] * SIZE
    assert at.side.view == View(0, 0)
    at.computed()
    assert at.model.tolist() == [2] * SIZE
    assert at.side.view == View(3, 3)


def test_the_first_read_is_waited_for_in_any_case() -> None:
    at = replica(Read(wait=False))
    assert at.log == []
    at.answer_all(at.of(m.Fetch), 1.0)
    assert at.log == [None]


def test_a_read_that_is_under_way_answers_one_that_asks_for_no_more() -> None:
    at = replica(READ, Read(wait=False, at_least=2), Read(wait=True, at_least=2))
    at.answer_all(at.of(m.Fetch), 0.0)
    at.answer_all(at.of(m.Fetch), 5.0, clock=2)
    assert at.log == [View(0, 0), None, View(2, 2)]
    assert len(at.of(m.Fetch)) == 2 * SERVERS


def test_a_read_of_a_larger_clock_is_not_answered_by_the_one_that_is_under_way() -> None:
    at = replica(READ, Read(wait=False, at_least=1), Read(wait=True, at_least=2))
    at.answer_all(at.of(m.Fetch), 0.0)
    fetches = at.of(m.Fetch)[SERVERS:]
    assert [fetch.clock_min for fetch in fetches] == [1, 1]
    at.answer_all(fetches, 5.0, clock=1)
    assert len(at.log) == 2
    newer = at.of(m.Fetch)[2 * SERVERS :]
    assert [fetch.clock_min for fetch in newer] == [2, 2]
    at.answer_all(newer, 6.0, clock=2)
    assert at.log[2:] == [View(2, 2)]
    assert at.model.tolist() == [6] * SIZE


def test_a_read_of_the_whole_model_is_not_answered_by_one_of_a_range() -> None:
    at = replica(READ, Read(wait=False, ranges=((1, 2),)), READ)
    at.answer_all(at.of(m.Fetch), 0.0)
    (part,) = at.of(m.Fetch)[SERVERS:]
    at.answer(0, part, 1.0)
    assert at.model.tolist() == [0, 1, 0, 0, 0, 0]
    assert len(at.log) == 2
    at.answer_all(at.of(m.Fetch), 2.0)
    assert len(at.log) == 3
    assert at.model.tolist() == [2] * SIZE


def test_a_read_after_own_writes_is_asked_at_once_and_waits_at_the_shards() -> None:
    """A write and such a read take one round trip."""
    at = replica(READ, Write(vector=ONES.copy()), Read(wait=True, after_own=True))
    at.answer_all(at.of(m.Fetch), 0.0)
    assert len(at.of(m.Push)) == SERVERS
    assert [fetch.after for fetch in at.of(m.Fetch)] == [0] * SERVERS + [1] * SERVERS
    assert at.training.phase().what == "fetching"
    at.answer_all(at.of(m.Fetch), 1.0)
    assert len(at.log) == 3


def test_own_writes_to_another_table_are_not_waited_for() -> None:
    seen = np.zeros(CELLS, np.float32)
    at = replica(READ, Write(table="seen", vector=seen), Read(wait=True, after_own=True))
    at.answer_all(at.of(m.Fetch), 0.0)
    assert [fetch.after for fetch in at.of(m.Fetch)] == [0] * 2 * SERVERS


def test_after_own_is_not_answered_by_a_read_from_before_the_push() -> None:
    after = Read(wait=True, after_own=True)
    at = replica(READ, Read(wait=False), Write(vector=ONES.copy()), after)
    at.answer_all(at.of(m.Fetch), 0.0)
    for shard, push in enumerate(at.of(m.Push)):
        at.ack(push, shard)
    at.answer_all(at.of(m.Fetch), 1.0)
    assert len(at.log) == 3
    at.answer_all(at.of(m.Fetch), 2.0)
    assert len(at.log) == 4
    assert at.model.tolist() == [2] * SIZE


def test_after_own_is_not_answered_by_a_read_from_before_a_push_that_is_settled_by_now() -> None:
    push = Write(vector=ONES.copy(), wait=True)
    at = replica(READ, Read(wait=False), push, Read(wait=True, after_own=True))
    at.answer_all(at.of(m.Fetch), 0.0)
    for shard, each in enumerate(at.of(m.Push)):
        at.ack(each, shard)
    assert len(at.of(m.Fetch)) == 2 * SERVERS
    at.answer_all(at.of(m.Fetch), 1.0)
    assert len(at.log) == 3
    at.answer_all(at.of(m.Fetch)[2 * SERVERS :], 2.0, clock=1)
    assert at.log[3:] == [View(1, 1)]


def test_what_became_of_the_newest_write_is_told_when_the_method_asks() -> None:
    push = Write(vector=ONES.copy(), weight=2.5)
    at = replica(Settle(), push, Settle(), push, Settle())
    assert at.log[:2] == [Receipt({}), None]
    first, second = at.of(m.Push)
    assert [first.weight, second.weight] == [2.5, 2.5]
    at.ack(first, 0)
    assert len(at.log) == 2
    at.ack(second, 1, LATE)
    assert at.log[2] == Receipt({0: APPLIED, 1: LATE})
    for shard, each in enumerate(at.of(m.Push)[2:]):
        at.ack(each, shard, LATE)
    assert at.log[3:] == [None, Receipt({0: LATE, 1: LATE})]


@pytest.mark.parametrize(
    "later", [Read(wait=False, at_least=9), Read(wait=False, after_own=True)], ids=str
)
def test_nothing_that_is_not_waited_for_waits(later: Read) -> None:
    """It is asked for behind what is before it, and comes between two steps."""
    push = Write(vector=ONES.copy())
    at = replica(READ, push, Read(wait=False), later, NextData())
    at.answer_all(at.of(m.Fetch), 0.0)
    assert at.log[1:] == [None, None, None]
    assert isinstance(at.need, NextData)
    at.answer_all(at.of(m.Fetch), 1.0)
    assert at.model.tolist() == [1] * SIZE
    behind = at.of(m.Fetch)[2 * SERVERS :]
    assert [fetch.clock_min for fetch in behind] == [later.at_least] * SERVERS
    assert [fetch.after for fetch in behind] == [int(later.after_own)] * SERVERS
    at.answer_all(behind, 2.0, clock=9)
    assert at.model.tolist() == [2] * SIZE
    assert at.side.view == View(9, 9)


def test_reads_that_have_to_wait_are_fetched_as_one_that_is_as_good_as_each() -> None:
    ranged = [Read(wait=False, ranges=(part,)) for part in ((0, 1), (4, 5), (0, 1))]
    more = (Read(wait=False, at_least=3), Read(wait=True, at_least=2))
    at = replica(READ, Read(wait=False), *ranged, NextData(), *more)
    at.answer_all(at.of(m.Fetch), 0.0)
    at.answer_all(at.of(m.Fetch), 1.0)
    assert [(fetch.lo, fetch.hi) for fetch in at.of(m.Fetch)[2 * SERVERS :]] == [(0, 1), (1, 2)]
    at.lease(1)
    assert len(at.log) == 7
    for shard, fetch in enumerate(at.of(m.Fetch)[2 * SERVERS :]):
        at.answer(shard, fetch, 5.0)
    assert at.model.tolist() == [5, 1, 1, 1, 5, 1]
    newest = at.of(m.Fetch)[3 * SERVERS :]
    assert [fetch.clock_min for fetch in newest] == [3, 3]
    at.answer_all(newest, 7.0, clock=3)
    assert at.log[7:] == [View(3, 3)]


def test_a_read_beside_the_model_leaves_it_alone() -> None:
    at = replica(READ, Read(wait=True, into="beside", at_least=3))
    at.answer_all(at.of(m.Fetch), 1.0)
    fetches = at.of(m.Fetch)[SERVERS:]
    assert all(fetch.exact and fetch.have_term == 0 for fetch in fetches)
    at.answer(0, fetches[0], 4.0, clock=3)
    at.answer(1, fetches[1], 5.0, clock=8)
    view = at.log[1]
    assert (view.clock_min, view.clock_max) == (3, 8)
    assert view.values.tolist() == [4, 4, 4, 5, 5, 5]
    assert at.model.tolist() == [1] * SIZE
    assert at.side.view == View(0, 0)


def test_another_table_is_read_beside_the_model_whatever_its_size() -> None:
    at = replica(Read(table="seen", wait=True, into="beside"))
    fetches = at.of(m.Fetch)
    assert [fetch.table for fetch in fetches] == [1, 1]
    cells = np.arange(CELLS)
    at.answer(0, fetches[0], cells[: CELLS // 2])
    at.answer(1, fetches[1], cells[CELLS // 2 :])
    assert at.log[0].values.tolist() == cells.tolist()


def test_ranges_are_asked_of_the_shards_that_have_them() -> None:
    ranges = ((0, 1), (2, 5))
    at = replica(Read(wait=True, into="beside", ranges=ranges))
    fetches = at.of(m.Fetch)
    assert [(f.lo, f.hi) for f in fetches] == [(0, 1), (2, 3), (0, 2)]
    assert fetches[1].request == fetches[2].request != fetches[0].request
    at.answer(0, fetches[0], 1.0, clock=2)
    at.answer(0, fetches[1], 2.0, clock=3)
    assert at.log == []
    at.answer(1, fetches[2], [3.0, 4.0], clock=5)
    assert at.log[0].values.tolist() == [1, 2, 3, 4]
    assert (at.log[0].clock_min, at.log[0].clock_max) == (2, 5)


def test_ranges_into_the_model_leave_the_rest_of_it_alone() -> None:
    at = replica(READ, Read(wait=True, ranges=((2, 4),)), READ)
    at.answer_all(at.of(m.Fetch), 1.0)
    first, second = at.of(m.Fetch)[SERVERS:]
    at.answer(0, first, 7.0)
    at.answer(1, second, 8.0)
    assert at.model.tolist() == [1, 1, 7, 8, 1, 1]
    # What stands there is of no one version: all of it is asked for, and no changes.
    assert [fetch.have_term for fetch in at.of(m.Fetch)[-2:]] == [0, 0]


@pytest.mark.parametrize("ranges", [((1, 1),), ((3, 2),), ((0, SIZE + 1),), ((-1, 2),)])
def test_ranges_that_the_table_does_not_have_are_the_methods_fault(ranges: Any) -> None:
    with pytest.raises(ValueError, match=" 6 elements"):
        replica(Read(wait=True, ranges=ranges))
    with pytest.raises(ValueError, match=" 6 elements"):
        replica(Write(vector=ONES, ranges=ranges))


def test_what_cannot_be_read_like_that_is_the_methods_fault() -> None:
    with pytest.raises(ValueError, match='"seen"'):
        replica(Read(table="seen", wait=True))


def test_what_is_read_beside_the_model_can_be_asked_for_ahead() -> None:
    """The same read with `wait` gets what has come of it meanwhile; another one asks anew."""
    part = Read(wait=False, into="beside", ranges=((2, 5),), at_least=4)
    at = replica(READ, part, NextData(), replace(part, wait=True), replace(part, wait=True))
    at.answer_all(at.of(m.Fetch), 1.0)
    assert at.log[1:] == [None]
    ahead = at.of(m.Fetch)[SERVERS:]
    at.answer(0, ahead[0], 3.0, clock=4)
    at.answer(1, ahead[1], 4.0, clock=4)
    assert len(at.log) == 2
    at.lease(1)
    assert at.log[3].values.tolist() == [3, 4, 4]
    assert at.model.tolist() == [1] * SIZE
    assert len(at.of(m.Fetch)) == 3 * SERVERS


# ---------------------------------------------------------------- writes


def test_a_write_is_on_its_way_at_once_while_the_window_has_room() -> None:
    at = replica(*[Write(vector=ONES.copy(), samples=3, clock=2, part=1)] * (WINDOW + 1))
    assert at.log == [None] * WINDOW
    pushes = at.of(m.Push)
    assert [push.seq for push in pushes] == [seq for seq in range(WINDOW) for _ in range(SERVERS)]
    assert {(push.samples, push.clock, push.portion, push.at) for push in pushes} == {(3, 2, 1, 0)}
    for shard in range(SERVERS):
        at.ack(pushes[shard], shard)
    assert at.log == [None] * (WINDOW + 1)


def test_ranges_may_go_to_all_shards_so_that_the_clocks_of_all_go_on() -> None:
    at = replica(Write(vector=ONES[:2].copy(), ranges=((0, 2),), to_all=True, clock=5))
    assert [(push.clock, push.delta.length, push.is_part) for push in at.of(m.Push)] == [
        (5, 2, True),
        (5, 0, True),
    ]


def parts(*, anew: bool) -> Replica:
    """A step in two parts, of which the first is pushed twice if the method begins anew."""
    first, second = (
        Write(vector=ONES[:3].copy(), ranges=(part,), of=2, samples=n)
        for part, n in (((0, 3), 1), ((3, 6), 0))
    )
    again = (Write(vector=None, holds_steps=False), first) if anew else ()
    return replica(READ, Gradient(), first, *again, second)


@pytest.mark.parametrize("anew", [False, True])
def test_a_step_in_parts_is_done_when_all_of_them_are_settled(anew: bool) -> None:
    at = parts(anew=anew)
    at.answer_all(at.of(m.Fetch), 0.0)
    at.lease(1)
    at.computed()
    assert not at.training.writing.has_unpushed_steps()
    shards = [0, *([0, 1, 0] if anew else []), 1]
    *before, last = zip(at.of(m.Push), shards, strict=True)
    for push, shard in before:
        at.ack(push, shard)
    assert at.of(m.PortionDone) == []
    at.ack(*last)
    assert [done.samples for done in at.of(m.PortionDone)] == [1]


def test_a_step_of_which_a_part_is_missing_is_not_pushed() -> None:
    first = Write(vector=ONES[:3].copy(), ranges=((0, 3),), of=2, samples=1)
    at = replica(READ, Gradient(), first, NextData())
    at.answer_all(at.of(m.Fetch), 0.0)
    at.lease(1)
    at.computed()
    assert at.training.writing.has_unpushed_steps()
    at.ack(at.of(m.Push)[0], 0)
    assert at.of(m.PortionDone) == []


def test_a_receipt_comes_when_all_shards_have_settled_the_push() -> None:
    at = replica(Write(vector=ONES.copy(), wait=True))
    first, second = at.of(m.Push)
    at.ack(first, 0, HELD)
    at.ack(second, 1, LATE)
    assert at.log == []
    at.ack(first, 0, APPLIED)
    assert at.log == [Receipt({0: APPLIED, 1: LATE})]
    assert not at.log[0].is_applied()


@pytest.mark.parametrize("outcome", [APPLIED, BUFFERED, DUPLICATE, LATE, REFUSED])
def test_every_outcome_that_settles_a_push_is_in_its_receipt(outcome: str) -> None:
    at = replica(Write(vector=ONES.copy(), wait=True))
    for shard, push in enumerate(at.of(m.Push)):
        at.ack(push, shard, outcome)
    assert at.log == [Receipt(dict.fromkeys(range(SERVERS), outcome))]
    assert at.log[0].is_applied() == (outcome in (APPLIED, DUPLICATE))


def test_a_receipt_is_of_its_own_push_and_no_other() -> None:
    at = replica(Write(vector=ONES.copy()), Write(vector=ONES.copy(), wait=True))
    pushes = at.of(m.Push)
    for shard in range(SERVERS):
        at.ack(pushes[shard], shard, LATE)
    assert at.log == [None]
    for shard in range(SERVERS):
        at.ack(pushes[SERVERS + shard], shard)
    assert at.log[1:] == [Receipt({0: APPLIED, 1: APPLIED})]


def test_ranges_are_pushed_to_the_shards_that_have_them() -> None:
    vector = np.array([1, 2, 3, 4], np.float32)
    at = replica(Write(vector=vector, ranges=((1, 4), (5, 6)), wait=True))
    pushes = at.of(m.Push)
    values = [push.delta.arrays[0].tolist() for push in pushes]
    assert list(zip([(p.seq, p.at) for p in pushes], values, strict=True)) == [
        ((0, 1), [1, 2]),  # Of shard 0, the elements 1 and 2,
        ((0, 0), [3]),  # of shard 1 its first one,
        ((1, 2), [4]),  # and its last one.
    ]
    at.ack(pushes[0], 0)
    at.ack(pushes[1], 1, REFUSED)
    assert at.log == []
    at.ack(pushes[2], 1)
    assert at.log == [Receipt({0: APPLIED, 1: REFUSED})]


def test_a_receipt_names_only_shards_that_the_push_had_something_for() -> None:
    at = replica(Write(vector=ONES[:1].copy(), ranges=((4, 5),), wait=True))
    (push,) = at.of(m.Push)
    at.ack(push, 1)
    assert at.log == [Receipt({1: APPLIED})]


def test_a_write_of_many_ranges_waits_for_room_for_all_of_them() -> None:
    ranges = tuple((0, 1) for _ in range(14))
    at = replica(
        *[Write(vector=ONES.copy())] * 3, Write(vector=np.ones(14, np.float32), ranges=ranges)
    )
    assert len(at.of(m.Push)) == 3 * SERVERS
    first, second, *_ = at.of(m.Push)
    at.ack(first, 0)
    at.ack(second, 1)
    assert len(at.of(m.Push)) == 3 * SERVERS + 14
    with pytest.raises(ValueError, match=r"17 .* 16\b"):
        replica(Write(vector=np.ones(17, np.float32), ranges=((0, 1),) * 17))


def test_other_tables_are_pushed_as_they_are() -> None:
    seen = np.arange(CELLS, dtype=np.float32)
    at = replica(Write(table="seen", vector=seen, samples=2, wait=True))
    pushes = at.of(m.Push)
    assert [push.table for push in pushes] == [1, 1]
    sent = np.concatenate([push.delta.arrays[0] for push in pushes])
    assert sent.tolist() == seen.tolist() == list(range(CELLS))
    for shard, push in enumerate(pushes):
        at.ack(push, shard)
    assert at.log == [Receipt({0: APPLIED, 1: APPLIED})]


def test_an_empty_push_has_the_size_of_its_table() -> None:
    at = replica(Write(vector=None), Write(table="seen", vector=None))
    lengths = [push.delta.length for push in at.of(m.Push)]
    assert lengths == [3, 3, CELLS // 2, CELLS - CELLS // 2]


def test_a_vector_of_another_size_is_the_methods_fault() -> None:
    with pytest.raises(ValueError, match=r'6 .* 65 .*"seen"'):
        replica(Write(table="seen", vector=ONES))
    with pytest.raises(ValueError, match=r'6 .* 2 .*"w"'):
        replica(Write(vector=ONES, ranges=((0, 2),)))


def test_pushes_refused_in_a_row_are_counted_by_table() -> None:
    seen = np.zeros(CELLS, np.float32)
    needs = [Write(vector=ONES.copy()), Write(table="seen", vector=seen, wait=True)]
    at = replica(*needs, *needs)
    for turn in (1, 2):
        for shard, push in enumerate(at.of(m.Push)[-4:-2]):
            at.ack(push, shard, REFUSED if shard < turn else APPLIED)
        for shard, push in enumerate(at.of(m.Push)[-2:]):
            at.ack(push, shard)
        assert at.training.accounts.bad_gradients.pushes_in_row == turn


# ---------------------------------------------------------------- data and gradients


def at_work(*needs: Need, samples: int, **more: Any) -> Replica:
    """With parameters, and a portion of so many samples; a batch has one, or `batch_size`."""
    at = replica(READ, *needs, **more)
    at.answer_all(at.of(m.Fetch), 1.0)
    at.log.clear()
    at.lease(samples)
    return at


OWN = Gradient(step=True, gather=False, steps=3)


def test_several_steps_are_computed_in_one_go() -> None:
    at = at_work(OWN, samples=5)
    compute = at.of(Compute)[0]
    assert (compute.number, compute.count, compute.own_lr) == (0, 3, OWN_LR)
    at.computed(3.0, before=(1.0, 2.0), own=True)
    assert at.log == [Step(None, 3, 2.0, 1.0, 3)]
    assert at.training.writing.steps == 3
    assert at.training.accounts.rates.total["samples"] == 3


def test_a_step_that_is_skipped_is_no_fault_and_the_next_batch_follows() -> None:
    at = at_work(NextData(), Gradient(), samples=3)
    skipped = Computed(1.0, None, np.zeros(0), np.inf, False, is_skipped=True)
    at.training.on_event(skipped, 0.0)
    at.advance()
    assert at.training.accounts.bad_gradients.steps == at.training.writing.steps == 0
    assert [compute.number for compute in at.of(Compute)] == [0, 1]
    at.computed(2.0)
    assert at.log[-1].loss == 2.0


def failed(number: int, sample: int) -> FailedSample:
    return FailedSample(number, sample, "it is torn", "the traceback")


def test_samples_that_failed_to_load_do_not_count_and_are_told_once() -> None:
    at = at_work(OWN, Done(), samples=9, batch_size=3)
    lacking = failed(0, 7), failed(2, 7), failed(2, 5)
    at.computed(3.0, before=(1.0, 2.0), own=True, failed=lacking)
    assert at.log[:1] == [Step(None, 6, 2.0, 1.0, 3)]
    (done,) = at.of(m.PortionDone)
    assert (done.steps, done.samples, done.loss_sum) == (3, 6, 1.0 * 2 + 2.0 * 3 + 3.0)
    told = [(said.data_epoch, said.sample) for said in at.of(m.SampleFailed)]
    assert told == [(0, 7), (0, 5)]


def test_a_batch_without_any_sample_is_left_out_and_no_fault() -> None:
    at = at_work(Gradient(), Gradient(), Done(), samples=3)
    empty = Computed(np.nan, None, np.zeros(0), np.nan, False, is_skipped=True)
    at.computed()
    at.training.on_event(replace(empty, failed=(failed(1, 4),)), 0.0)
    at.advance()
    assert at.training.accounts.bad_gradients.steps == 0
    assert [compute.number for compute in at.of(Compute)] == [0, 1, 2]
    at.computed()
    (done,) = at.of(m.PortionDone)
    assert (done.steps, done.samples) == (2, 2)


@pytest.mark.parametrize("leaves", [False, True])
def test_an_announced_batch_that_was_nothing_lets_the_method_hear_of_the_end_where_it_asks(
    leaves: bool,
) -> None:
    """It may push what it has only there; and hears of it although nothing came since."""
    at = replica(NextData(), Gradient(), NextData(), Gradient(), NextData())
    at.lease(1)
    at.computed()
    at.lease(1)
    at.training.steps.draining = leaves
    nothing = Computed.of_nothing(np.zeros(0))
    at.training.on_event(nothing, 0.0)
    at.advance()
    if not leaves:
        at.lease(0)
    assert at.log[1] is not None
    assert at.log[3:] == [None, None], "the gradient, and then: no data"


@pytest.mark.parametrize(
    ("skipped", "following"),
    [
        (1, None),  # The gradient is of the batch after it.
        (2, (0, 3, True)),
        (3, (1, 0, False)),
    ],
)
def test_an_announced_batch_that_was_nothing_is_no_other_client_s_and_not_the_last_one_instead(
    skipped: int, following: tuple[int, int, bool] | None
) -> None:
    """The method has been told which portion it is of, and whether that ends with it."""
    at = replica(*([NextData(), Gradient()] * 4), NextData(), Gradient())
    at.lease(4)
    for _ in range(skipped):
        at.computed()
    if len(at.of(m.LeaseRequest)) == 2:  # The last batch has begun.
        at.lease(4)
    at.training.on_event(Computed(1.0, None, np.zeros(0), np.inf, False, is_skipped=True), 0.0)
    at.advance()
    answers = at.log[2 * skipped + 1 :]
    if following is None:
        assert not answers
        assert at.training.is_at_work()
    else:
        portion, number, is_last = following
        assert answers == [None, NextBatch(0, portion, is_last, number)]


def test_a_shard_of_a_stream_that_ends_is_told_with_the_next_question_and_its_portion() -> None:
    at = replica(Gradient(), Gradient(), Done())
    at.stream_lease(4, shard=2)
    at.computed()
    at.training.on_event(Computed.of_nothing(np.zeros(0)), 0.0)
    at.advance()
    assert [asked.ends for asked in at.of(m.LeaseRequest)] == [(), (0, 2, 1)]
    at.lease(0)
    (done,) = at.of(m.PortionDone)
    assert (done.steps, done.samples, done.end) == (1, 1, 1)


def test_while_a_save_waits_no_batch_is_begun() -> None:
    at = at_work(Gradient(), Write(vector=ONES.copy()), Gradient(), samples=3)
    at.training.steps.holds = True
    at.computed(1.0)
    assert len(at.of(m.Push)) == SERVERS
    assert len(at.of(Compute)) == 1
    assert at.training.phase().what == "saving"
    at.training.steps.holds = False
    at.advance()
    assert len(at.of(Compute)) == 2


def test_several_steps_end_with_their_portion() -> None:
    at = at_work(OWN, OWN, OWN, samples=4)
    at.computed(1.0, before=(1.0, 1.0), own=True)
    compute = at.of(Compute)[-1]
    assert (compute.number, compute.count) == (3, 1)
    at.computed(1.0, own=True)
    at.lease(9)
    assert [(c.start, c.number, c.count) for c in at.of(Compute)[2:]] == [(0, 0, 3)]


def test_a_batch_of_no_use_ends_several_steps_and_those_before_it_count() -> None:
    at = at_work(OWN, OWN, Write(vector=ONES.copy()), samples=5)
    at.computed(np.nan, before=(1.0,), own=True)
    (step,) = at.log
    assert (step.steps, step.samples, step.loss, step.norm) == (1, 1, 1.0, np.inf)
    assert at.training.accounts.bad_gradients.steps == 1
    # The batch is not computed again.
    compute = at.of(Compute)[-1]
    assert (compute.number, compute.count) == (2, 3)
    at.computed(1.0, before=(1.0, 1.0), own=True)
    assert at.log[1].steps == 3
    for shard, push in enumerate(at.of(m.Push)):
        at.ack(push, shard)
    (done,) = at.of(m.PortionDone)
    assert (done.steps, done.samples, done.loss_sum) == (4, 4, 4.0)


def test_several_steps_of_which_the_first_is_of_no_use_go_on_with_the_next() -> None:
    at = at_work(OWN, samples=5)
    at.computed(np.nan, own=True)
    assert at.log == []
    compute = at.of(Compute)[-1]
    assert (compute.number, compute.count) == (1, 3)
    assert at.training.writing.steps == 0


def test_an_announced_batch_of_no_use_is_told() -> None:
    at = at_work(NextData(), OWN, samples=5)
    assert at.log == [NextBatch(0, 0, False)]
    at.computed(np.nan, own=True)
    assert at.log[1:] == [None]


def test_steps_that_no_push_holds_are_done_when_the_method_says_so() -> None:
    at = at_work(Gradient(), Gradient(), Done(), samples=2)
    at.computed()
    at.computed()
    assert at.log[2:] == [None]
    (done,) = at.of(m.PortionDone)
    assert (done.portion, done.steps, done.samples, done.loss_sum) == (0, 2, 2, 2.0)
    assert not at.training.writing.has_unpushed_steps()


def test_all_but_the_newest_steps_are_done_when_the_method_says_so() -> None:
    part = Write(vector=ONES[:3].copy(), ranges=((0, 3),))
    at = at_work(Gradient(), Gradient(), part, Gradient(), Done(but=1), Done(), samples=2)
    at.computed()
    at.computed()
    for shard, push in enumerate(at.of(m.Push)):
        at.ack(push, shard)
    assert at.of(m.PortionDone) == [], "no single write of parts holds steps"
    assert at.training.writing.is_in_parts()
    at.lease(1)
    at.computed()
    assert [done.portion for done in at.of(m.PortionDone)] == [0, 1]
    assert not at.training.writing.has_unpushed_steps()


def test_steps_that_are_not_done_stay_unpushed() -> None:
    part = Write(vector=ONES[:3].copy(), ranges=((0, 3),))
    at = at_work(Gradient(), part, Gradient(), Done(but=1), samples=1)
    at.computed()
    at.lease(1)
    at.computed()
    assert [done.portion for done in at.of(m.PortionDone)] == [0]
    assert at.training.writing.has_unpushed_steps()
    assert at.training.writing.is_in_parts()


def test_no_portion_is_done_before_all_of_its_batches_are_computed() -> None:
    at = at_work(Gradient(), Done(), Gradient(), Done(), samples=2)
    at.computed()
    assert at.log[1:] == [None]
    assert at.of(m.PortionDone) == []
    at.computed()
    assert [done.steps for done in at.of(m.PortionDone)] == [2]


def test_a_portion_that_ends_with_a_bad_batch_is_done_by_what_there_is() -> None:
    at = at_work(Gradient(), Done(), Gradient(), samples=2)
    at.computed()
    at.computed(np.nan)
    assert [done.steps for done in at.of(m.PortionDone)] == [1]


def test_a_portion_that_ends_with_a_bad_batch_waits_for_the_push_of_the_others() -> None:
    """Whatever was written to other tables since, and settled before it."""
    needs = [
        Write(vector=ONES.copy()),
        Write(table="seen", vector=np.zeros(CELLS, np.float32), wait=True),
    ]
    at = at_work(Gradient(), *needs, Gradient(), samples=2)
    at.computed()
    pushes = at.of(m.Push)
    for shard, push in enumerate(pushes[SERVERS:]):
        at.ack(push, shard)
    at.computed(np.nan)
    assert at.of(m.PortionDone) == []
    for shard, push in enumerate(pushes[:SERVERS]):
        at.ack(push, shard)
    assert [done.steps for done in at.of(m.PortionDone)] == [1]


def test_a_write_to_another_table_does_not_hold_a_portion_up() -> None:
    needs = [
        Write(vector=ONES.copy(), wait=True),
        Write(table="seen", vector=np.zeros(CELLS, np.float32)),
    ]
    at = at_work(Gradient(), *needs, Gradient(), samples=2)
    at.computed()
    for shard, push in enumerate(at.of(m.Push)[:SERVERS]):
        at.ack(push, shard)
    at.computed(np.nan)
    assert [done.steps for done in at.of(m.PortionDone)] == [1]


def test_an_engine_gives_its_arrays() -> None:
    with_engine = replace(TWO_TABLES, engine="x:Engine", twin="x:Twin")
    at = replica(Engine(op="invert", arrays=(ONES,)), shape=with_engine)
    assert at.of(RunEngine) == [RunEngine("invert", (ONES,))]
    assert at.training.is_at_work()
    at.training.on_event(EngineRan((2 * ONES,)), 0.0)
    at.advance()
    assert at.log[0][0].tolist() == [2] * SIZE


# ---------------------------------------------------------------- ends


def test_the_last_needs_are_served_when_it_leaves_and_then_it_is_parked() -> None:
    last = [Write(vector=ONES.copy(), wait=True), Read(wait=True, into="beside")]
    at = at_work(Gradient(), Write(vector=ONES.copy()), samples=1, leave=last)
    at.computed()
    at.training.steps.draining = True
    at.advance()
    assert not at.training.parked
    for number, push in enumerate(at.of(m.Push)):
        at.ack(push, number % SERVERS)
    assert not at.training.parked
    at.answer_all(at.of(m.Fetch), 3.0)
    receipt, view = at.log[-2:]
    assert receipt.is_applied()
    assert view.values.tolist() == [3] * SIZE
    assert at.training.parked
    assert at.training.phase().what == "draining"  # The coordinator has not noted its portion yet.
    at.context.retries.done(("portion", 0, 0), 0.0)
    assert at.training.phase().what == "drained"


@pytest.mark.parametrize("kind", [list, iter], ids=["a list", "an iterator"])
def test_what_it_needs_as_it_leaves_may_be_any_iterable(kind: Any) -> None:
    at = at_work(Gradient(), Write(vector=ONES.copy()), samples=1)
    last = [Read(wait=True, into="beside"), Write(table="seen", vector=np.ones(CELLS, np.float32))]
    at.side.leave = lambda: kind(last)  # type: ignore[method-assign]
    at.computed()
    at.training.steps.draining = True
    at.advance()
    at.answer_all(at.of(m.Fetch), 3.0)
    assert [push.table for push in at.of(m.Push)] == [0] * SERVERS + [1] * SERVERS
    assert at.training.parked


def test_it_leaves_between_two_portions_only() -> None:
    at = at_work(Gradient(), Gradient(), Done(), samples=2)
    at.training.steps.draining = True
    at.computed()
    assert not at.training.parked
    at.computed()
    assert at.training.parked


def test_a_method_hears_once_that_there_is_no_data_before_it_leaves() -> None:
    at = replica(NextData(), Write(vector=ONES.copy()))
    at.training.steps.draining = True
    at.advance()
    assert at.log == [None, None]
    assert len(at.of(m.Push)) == SERVERS
    assert at.training.parked


@pytest.mark.parametrize("need", [NextData(), Gradient()])
def test_a_method_that_leaves_gets_no_data_any_more(need: Need) -> None:
    at = replica(leave=[need])
    at.training.steps.draining = True
    with pytest.raises(TypeError, match=r"leave\(\)"):
        at.advance()


def test_what_no_service_serves_is_named() -> None:
    class Wish(Need):
        def __repr__(self) -> str:
            return "Wish()"

    with pytest.raises(TypeError, match=rf"^{Replica.__module__}: .*Wish\(\)"):
        replica(Wish())
    with pytest.raises(TypeError, match=r'Ask.*"peers"'):
        replica(Ask(slot=1, op="model"))
    with pytest.raises(TypeError, match=r"OwnState.*\(Method\.inner\)"):
        replica(OwnState())
    with pytest.raises(TypeError, match=r"Engine.*\(Shape\.engine"):
        replica(Engine(op="x"))
    with pytest.raises(TypeError, match="None"):
        replica(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("need", [READ, Write(vector=ONES)])
def test_without_servers_nothing_is_read_or_written(need: Need) -> None:
    with pytest.raises(TypeError, match=type(need).__name__):
        replica(need, shape=Shape(tables=(), model="replica"))


def test_a_method_that_comes_to_its_end_is_named() -> None:
    at = Replica(())
    at.training._run = at._each(())
    with pytest.raises(TypeError, match=rf"^{Replica.__module__}: run\(\)"):
        at.advance()
