"""Who asks gets a portion, whatever it does between two requests; each is settled once."""

from __future__ import annotations

from typing import Any

import pytest
from leased import MAPPED, Leased, portion_done

from dlctl.errors import RemoteProtocolError
from dlctl.job.config import Evaluation
from dlctl.roles.coordinator.pools.data_pool import DONE
from dlctl.roles.coordinator.training.dataset import Dataset
from dlctl.wire import messages as m


def at_work(*arguments: Any, **more: Any) -> Leased:
    run = Leased(*arguments, **more)
    run.release()
    return run


# ---------------------------------------------------------------- requests


def test_nobody_gets_data_before_all_are_ready() -> None:
    run = Leased()
    assert [run.ask(slot) for slot in (1, 0)] == [None, None]
    run.release()
    answers = run.sent()
    assert {slot: len(leases) for slot, leases in answers.items()} == {1: 1, 0: 1}
    assert answers[1][0].portion == 0, "in the order in which they have asked"


def test_a_repeated_request_has_the_same_answer_and_one_that_was_overtaken_has_none() -> None:
    run = at_work()
    first = run.asks(0, request=5)
    assert run.asks(0, request=5) == first
    second = run.asks(0, request=6)
    assert second.portion != first.portion
    assert run.ask(0, request=5) is None


def test_a_newer_request_takes_the_place_of_one_that_waits() -> None:
    run = Leased()
    run.ask(0, request=1)
    run.ask(0, request=2)
    run.release()
    ((lease,),) = run.sent().values()
    assert lease.request == 2


def test_a_loop_that_asks_on_demand_may_have_any_number_and_end_them_in_any_order() -> None:
    """It reports in its own time, or not at all, and says nothing of what it has."""
    run = at_work()
    leases = [run.asks(0) for _ in range(5)]
    run.report(0)
    run.report(0, portions=5, request=leases[-1].request)
    for lease in reversed(leases):
        run.now += 100.0
        run.done(0, lease)
    assert (run.progress.steps, run.progress.samples) == (10, 80)
    assert run.asks(1).portion == 1, "nothing of it is leased again"


def test_who_prefetches_leaves_their_share_to_the_others() -> None:
    run = at_work(epochs=1.0)
    run.asks(0)
    assert run.asks(0, ahead=True).stop > 0
    nothing = run.ask(0, ahead=True)
    assert nothing is not None
    assert nothing.start == nothing.stop
    assert run.asks(1).stop > 0
    assert run.asks(0).stop > 0, "who has nothing to do gets it all the same"


def test_all_that_wait_hear_of_the_end() -> None:
    run = at_work(epochs=1.0)
    leases = [run.asks(slot) for slot in (0, 1, 2, 0)]
    assert run.ask(1) == m.Lease(run._asked, 0, 0, 0, 0, 0)
    run.done(0, leases[0])
    run.ends()
    nothing = run.ask(2)
    assert nothing is not None
    assert nothing.start == nothing.stop
    for slot, lease in zip((1, 2, 0), leases[1:], strict=True):
        run.done(slot, lease)
    assert run.progress.samples == MAPPED.samples, "what they had counts"


def test_a_lease_says_how_far_the_run_is() -> None:
    run = at_work()
    run.done(0, run.asks(0))
    assert run.asks(0).samples == 16


# ---------------------------------------------------------------- what is given back


def test_what_a_dead_worker_had_goes_to_the_next_that_asks() -> None:
    run = at_work()
    mine = [run.asks(0), run.asks(0)]
    run.asks(1)
    assert run.leases.gone(0, 1.0) == 2
    for lease in mine:
        run.done(0, lease)
    assert run.progress.steps == 0, "that process is not there any more"
    again = [run.asks(1), run.asks(2)]
    assert [lease.portion for lease in again] == [lease.portion for lease in mine]
    assert run.leases.gone(0, 1.0) == 0


def test_the_next_process_of_a_slot_is_answered_whatever_its_numbers() -> None:
    run = at_work()
    first = run.asks(0, request=1000)
    run.leases.gone(0, 1.0)
    assert run.asks(0, request=1).portion == first.portion


@pytest.mark.parametrize(
    ("metrics", "is_free"),
    [
        ({"portions": 0, "request": 7}, True),
        ({"portions": 1, "request": 7}, False),
        ({"portions": 0, "request": 6}, False),
        ({"portions": 0}, False),
        ({"request": 7}, False),
        ({}, False),
    ],
)
def test_what_is_only_on_record_as_leased_is_leased_again(metrics, is_free) -> None:
    """Its end was told to a coordinator whose disk was full. Only who says that it has nothing, and
    was given nothing since, has nothing.
    """
    run = at_work(epochs=1.0)
    lost = [run.asks(0) for _ in range(4)]
    assert run.ask(0, request=7) is not None
    run.report(0, **metrics)
    taken = run.ask(1)
    assert taken is not None
    assert (taken.stop > 0) == is_free
    run.done(0, lost[-1])
    assert run.progress.steps == 2, "it may come late all the same"


def test_a_report_from_before_an_answer_proves_nothing() -> None:
    run = at_work(epochs=1.0)
    lease = run.asks(0, request=7)
    run.report(0, portions=0, request=7)
    assert [run.asks(1).portion for _ in range(3)] == [1, 2, 3]
    run.done(0, lease)
    assert run.progress.steps == 2


# ---------------------------------------------------------------- what is settled


def test_a_portion_is_settled_once_by_who_has_it() -> None:
    run = at_work()
    lease = run.asks(0)
    run.done(1, lease)
    assert run.progress.steps == 0
    for _ in range(3):
        run.done(0, lease)
    assert (run.progress.steps, run.progress.samples) == (2, 16)
    assert run.lead.side.steps_done == 2


@pytest.mark.parametrize("said", [{"steps": 3}, {"samples": 17}])
def test_more_than_there_is_in_it_is_refused_and_changes_nothing(said: dict[str, int]) -> None:
    run = at_work()
    lease = run.asks(0)
    with pytest.raises(RemoteProtocolError, match=" 2 and 16"):
        run.done(0, lease, **said)
    assert (run.progress.steps, run.data.pool.holds(0)) == (0, True)
    run.done(0, lease)
    assert run.progress.steps == 2


def test_the_end_of_a_stream_comes_with_a_request_or_a_portion_that_is_done() -> None:
    run = at_work(Dataset(shards=3))
    leases = [run.asks(slot) for slot in range(3)]
    run.ask(0, ends=(0, leases[0].shard, 5))
    with pytest.raises(RemoteProtocolError, match="portion"):
        run.done(1, leases[1], samples=3, end=999)
    run.done(1, leases[1], samples=3, end=3)
    assert {run.asks(slot).shard for slot in (0, 1, 2)} == {leases[2].shard}


def test_one_event_tells_of_a_stream_that_has_ended_before_the_run() -> None:
    run = at_work(Dataset(shards=1))
    lease = run.asks(0)
    run.done(0, lease, samples=5, end=5)
    assert [run.asks(0).data_epoch, run.asks(0).data_epoch] == [1, 1]
    run = at_work(Dataset(shards=1))
    run.done(0, run.asks(0), samples=5, end=5)
    run.leases.on_request(m.LeaseRequest(0, 1, 99, False), 1.0)
    run.leases.grant(2.0)
    texts = run.events()
    assert [text.startswith("the stream") for text in texts] == [True]


# ---------------------------------------------------------------- the method's lead


def test_who_has_to_wait_for_the_method_is_told_of_and_answered_once_it_may_work() -> None:
    run = at_work(options={"warmstart_steps": 2})
    lease = run.asks(0)
    assert run.ask(1) is None
    assert "worker-0 " in run.leases.held_back(1.0)
    run.done(0, lease)
    assert [lease.portion for lease in run.sent()[1]] == [1]
    assert run.leases.held_back(1.0) == ""


def test_in_a_round_everybody_is_answered_and_the_next_begins_when_it_is_over() -> None:
    run = at_work(Dataset(40, clients=(8, 8, 8, 8, 8)), "fedavg", options={"clients_per_round": 2})
    leases = [run.asks(slot) for slot in (0, 1)]
    nothing = run.ask(2)
    assert nothing is not None, "it pushes what it has"
    assert nothing.start == nothing.stop
    assert run.lead.side.epoch == (2, 0, {0: 1, 1: 1})
    for slot, lease in enumerate(leases):
        run.done(slot, lease, steps=1, samples=8)
    assert run.lead.side.epoch.under_way == {}


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_goes_on_with_a_portion_that_nobody_has(ahead: bool) -> None:
    """It is on record as leased, and its worker has nothing."""
    run = Leased(Dataset(16), "sandblaster")
    memory = run.memory() | {
        "work": [1, 8, 0.1, 32, [1, 0], None], "portion/0/0": DONE, "portion/0/1": 0,
    }  # fmt: skip
    run = Leased(method="sandblaster", memory=memory)
    run.release()
    assert run.ask(0, request=7, ahead=ahead) is None
    run.report(0, portions=0, request=7)
    (leases,) = run.sent().values()
    assert {(lease.data_epoch, lease.portion) for lease in leases} == {(0, 1)}


def test_a_straggler_s_portion_goes_to_who_waits_and_a_deadline_says_when() -> None:
    run = at_work(Dataset(48), "sandblaster")
    late, quick = run.asks(0), run.asks(1)
    run.now = 1.0
    run.asks(2)
    run.now = 2.0
    assert run.leases.backup_due() is None
    run.done(1, quick)
    assert run.ask(1) is not None, "what is usual is known: the oldest is late"
    run.done(1, late)
    assert run.ask(0) is None
    assert run.leases.backup_due() == 3.0, "worker-2 has been at work since 1"


# ---------------------------------------------------------------- the next coordinator


def test_the_next_coordinator_repeats_answers_and_knows_who_has_what() -> None:
    run = at_work(evaluation=Evaluation(every_steps=4))
    run.done(0, run.asks(0), metric_sums={"seen": [32.0, 16]})
    lease = run.asks(1, request=9)
    following = Leased(memory=run.memory())
    following.run.released_at = 0.0
    repeated = following.ask(1, request=9)
    assert repeated is not None
    assert (repeated.portion, repeated.start, repeated.stop) == (1, lease.start, lease.stop)
    assert following.asks(2).portion == 2
    following.done(1, lease)
    assert (following.progress.steps, following.progress.metrics["seen"]) == (4, 2.0)
    assert following.leases.gone(2, 1.0) == 1


# ---------------------------------------------------------------- many workers


@pytest.mark.parametrize(
    ("method", "dataset"),
    [
        ("downpour", Dataset(8000)),
        ("downpour", Dataset(shards=500)),
        ("sandblaster", Dataset(8000)),
    ],
    ids=["portions", "stream", "batches"],
)
def test_an_event_costs_no_more_with_many_leases_and_many_that_wait(method, dataset) -> None:
    """No event goes through all leases, or asks the method about every worker that waits."""
    workers = 500
    run = Leased(dataset, method, samples=10**6)
    run.members.slots = list(range(workers))
    run.release()
    leases = [run.asks(slot) for slot in range(workers)]
    waiting = range(workers) if run.data.pool.keeps_waiting else ()
    for slot in waiting:
        assert run.ask(slot, ahead=True) is None
    walked = _watch(run)
    for slot in range(0, workers, 50):
        run.leases.settle(portion_done(slot, leases[slot]), 0.0)
        run.report(slot, portions=0, request=leases[slot].request)
        run.leases.on_request(m.LeaseRequest(slot, 1, 10_000 + slot, True), 0.0)
        run.leases.backup_due()
    assert walked["leases"] == 0
    assert walked["asked"] <= 4 * workers // 50


def _watch(run: Leased) -> dict[str, int]:
    """Counts walks through all leases, and questions to the lead."""
    walked = {"leases": 0, "asked": 0}
    holders, may_lease = run.data.pool.holders, run.lead.may_lease

    class Watched(dict[tuple[int, int], int]):
        def __iter__(self) -> Any:
            walked["leases"] += 1
            return super().__iter__()

        def items(self) -> Any:
            walked["leases"] += 1
            return super().items()

        def values(self) -> Any:
            walked["leases"] += 1
            return super().values()

    def asked(slot: int, first_slot: int) -> str:
        walked["asked"] += 1
        return may_lease(slot, first_slot)

    holders._leased = Watched(holders._leased)
    run.lead.may_lease = asked  # type: ignore[method-assign]
    return walked
