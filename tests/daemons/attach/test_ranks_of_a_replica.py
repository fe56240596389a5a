"""What the processes of one replica do together: share batches, count steps, make calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_feed import FakeFeed, Numbers, portions
from small_models import MODELS
from thread_ranks import ThreadRanks, in_ranks

from daemons.attach import groups, pace
from daemons.attach.batches import Batches
from daemons.attach.begin import attach
from daemons.attach.group_steps import merged
from daemons.attach.led import InAllRanks, LedCalls
from daemons.attach.pace import NONE, Together, Wish
from daemons.worker.data.sample_order import SampleOrder
from dlctl.errors import DlctlError
from dlctl.model.flat import Layout, TensorEntry
from dlctl.roles.protocol.loop_effects import LoopStep, PortionPart

RANKS = 3


def batches_of(rank: int, count: int, size: int, samples: int) -> list[list[int]]:
    """Those that one of so many processes gets of a dataset."""
    feed = FakeFeed([*portions(samples, 12), None])
    feed.ranks = SimpleNamespace(rank=rank, count=count)  # type: ignore[assignment]
    order = SampleOrder(samples, seed=3, shuffle=True)
    source = Batches(Numbers(samples), size, feed=feed, order=order, ahead=0)
    found = []
    try:
        while not feed.is_over:
            for rows in source:
                found.append(rows)
                feed.step()
    finally:
        feed.close()
    return found


@pytest.mark.parametrize("samples", [36, 40])
def test_the_batches_of_all_ranks_are_one_batch_of_so_many_samples(samples: int) -> None:
    whole = batches_of(0, 1, 4 * RANKS, samples)
    parts = zip(*(batches_of(rank, RANKS, 4, samples) for rank in range(RANKS)), strict=True)
    for rows, (first, *others) in zip(whole, parts, strict=True):
        every = first + [row for other in others for row in other]
        assert every == rows
        assert max(map(len, (first, *others))) - min(map(len, (first, *others))) <= 1


def test_where_data_ends_no_rank_is_without_a_sample() -> None:
    last = [batches_of(rank, RANKS, 4, 38)[-1] for rank in range(RANKS)]
    assert [len(rows) for rows in last] == [1, 1, 1]
    assert len({row for rows in last for row in rows}) == 2


def test_samples_of_a_lease_count_once_and_own_ones_are_added() -> None:
    piece = (PortionPart(0, 0, 0, 6),)

    def steps(ranks: ThreadRanks) -> tuple[LoopStep, ...]:
        leased = LoopStep(6, float(ranks.rank), {"tokens": 2.0 * ranks.rank}, piece)
        return merged(ranks, (leased, LoopStep(1 + ranks.rank)))

    expected = (LoopStep(6, 1.0, {"tokens": 2.0}, piece), LoopStep(6, None, {}))
    assert in_ranks(RANKS, steps) == [expected] * RANKS


def test_ranks_look_up_at_the_same_steps_and_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "LOOK_S", 1e9)
    wanted = Wish(returns=True, reports=False)

    def look(ranks: ThreadRanks) -> tuple[list[int], int]:
        together = Together(ranks)
        wishes = [together.after_step(lambda: wanted) for _ in range(100)]
        return [n for n, wish in enumerate(wishes) if wish is not NONE], ranks.tells

    (steps, tells), *others = in_ranks(2, look)
    assert others == [(steps, tells)]
    assert steps == [0, 2, 6, 14, 30, 62], "the pause doubles"
    assert tells == len(steps)


class Sums:
    """What a call adds up, in one rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.total = rank, 0

    def restore(self, value: int) -> int:
        if value < 0 and self.rank == 1:
            raise ValueError("negative")
        self.total += value
        return self.total


def test_a_call_of_rank_0_is_made_in_all_ranks_and_an_error_of_one_is_named() -> None:
    def take_part(ranks: ThreadRanks) -> int:
        sums = Sums(ranks.rank)
        calls = LedCalls(ranks, {"sums": sums})
        if ranks.rank:
            calls.follow()
            return sums.total
        led = InAllRanks(calls, "sums", sums)
        with calls.leading():
            assert led.total == 0, "what is no call is asked of rank 0"
            assert led.restore(2) == 2
            with pytest.raises(DlctlError, match=r"rank 1.*negative"):
                led.restore(-1)
            led.restore(3)
        return sums.total

    assert in_ranks(RANKS, take_part) == [4, 5, 4]


# ---------------------------------------------------------------- what is refused


@contextmanager
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_one_of_several_processes_needs_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DlctlError) as caught:
        attach(MODELS["float32"]())
    assert "group=True" in (caught.value.hint or "")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert attach(MODELS["float32"]()).is_alone


def test_a_group_needs_torch_distributed() -> None:
    with pytest.raises(DlctlError) as caught:
        attach(MODELS["float32"](), group=True)
    assert "init_process_group" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("group", "processes", "rank", "said"),
    [
        (True, 2, 0, "processes = 1"),
        (True, 1, 1, "order of the ranks"),
        ("all", None, None, "ProcessGroup"),
    ],
)
def test_a_group_has_to_be_the_processes_of_the_worker(
    group: Any, processes: int | None, rank: int | None, said: str
) -> None:
    with group_of_one():
        with pytest.raises(DlctlError) as caught:
            groups.begin(group, processes, rank, 5.0)
        assert said in (caught.value.hint or "")
        assert groups.begin(True, 1, 0, 5.0).count == 1


def test_a_model_that_differs_is_named_in_all_ranks() -> None:
    def compare(ranks: ThreadRanks) -> str:
        size = 3 if ranks.rank == 1 else 2
        entries = (
            TensorEntry("a", "trained", (2,), "float32"),
            TensorEntry("b", "trained", (size,), "float32"),
        )
        try:
            groups.check_same(ranks, Layout(entries))
        except DlctlError as error:
            return error.message
        return ""

    (said, *others) = in_ranks(RANKS, compare)
    assert "rank 1" in said
    assert '"b" is float32[3]' in said
    assert others == [said] * 2


def test_a_replica_of_one_process_may_give_its_group() -> None:
    model = MODELS["float32"]()
    with group_of_one(), attach(model, torch.optim.SGD(model.parameters(), 0.1), group=True) as run:
        run.join()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        assert run.is_alone
        for parameter in model.parameters():
            assert any(torch.equal(parameter, value) for value in before)
