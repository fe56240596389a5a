"""Gradients that are summed while they are computed: two replicas and a real group, in threads."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from daemons.worker import early_sum
from daemons.worker.replica import TorchReplica
from daemons.worker.replica_group import GroupThread
from daemons.worker.stepper import Stepper
from daemons.worker.task.user_task import Task
from daemons.worker.work_clock import WorkClock
from dlctl.job.config import Gradients
from dlctl.roles.protocol.effects import (
    GroupJoined,
    JoinGroup,
    LeaveGroup,
    OpenStore,
    Reduce,
    Reduced,
    StoreOpened,
)
from dlctl.wire.machine import Event

WIDTH, ROWS = 48, 20
WAIT_S = 20.0


class Model(nn.Module):
    """Tied, sparse, in half precision, of no use to a batch, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.narrow = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out.weight = self.first.weight

    def forward(self, rows: torch.Tensor, takes_other: bool, again: bool) -> torch.Tensor:
        x = self.first(self.words(rows))
        x = self.narrow(x.bfloat16()).float()
        if takes_other:
            x = self.other(x)
        x = self.last(x).tanh()
        if again:
            x = checkpoint(self.last, checkpoint(self.last, x, use_reentrant=True),
                           use_reentrant=True)  # fmt: skip
        return self.out(x)


class Odd:
    def model(self) -> nn.Module:
        return Model()

    def dataset(self) -> Any:
        return torch.arange(ROWS)

    def loss(self, model: Model, batch: Any) -> torch.Tensor:
        return model(*batch).square().mean()


class Side:
    """One replica, and what it needs of a loop."""

    def __init__(self, slot: int, **gradients: Any) -> None:
        self.slot = slot
        replica = TorchReplica(Task(Odd()), device="cpu", seed=1)
        self.stepper = Stepper(replica, Gradients(**gradients))
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.group = GroupThread(self, "127.0.0.1", lambda: torch.device("cpu"), WorkClock())  # type: ignore[arg-type]
        self.step = 0

    def post(self, event: Event) -> None:
        self.events.put(event)

    offer = post

    def fail(self, error: Exception) -> None:
        raise error

    def hears(self, kind: type[Event]) -> Any:
        event = self.events.get(timeout=WAIT_S)
        assert isinstance(event, kind), event
        return event

    def gradient(self, batches: list[Any], *, sums: bool) -> np.ndarray[Any, Any]:
        parts = [(batch, 1 / len(batches)) for batch in batches]
        how = {"begin_sum": self.group.begin_sum} if sums else {}
        stepped = self.stepper.step(parts, samples=3 + self.slot, **how)
        assert stepped.is_usable
        return stepped.gradient

    def sum(self, vector: np.ndarray[Any, Any], weight: float) -> Reduced:
        self.step += 1
        self.group.reduce(Reduce(1, vector, weight, self.step, False, False, self.slot))
        reduced: Reduced = self.hears(Reduced)
        return reduced


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch, request) -> Iterator[list[Side]]:
    """In one group, with several parts even of this model; all its parameters are looked at."""
    for name, value in {"PARTS": 8, "PART_MIN": 1000, "LOOKED_AT": 100}.items():
        monkeypatch.setattr(early_sum, name, value)
    sides = [Side(slot, **getattr(request, "param", {})) for slot in range(2)]
    sides[0].group.open(OpenStore(1))
    store = sides[0].hears(StoreOpened).address
    for rank, side in enumerate(sides):
        side.group.join(JoinGroup(1, rank, 2, store, 5.0))
    for side in sides:
        side.hears(GroupJoined)
    yield sides
    for side in sides:
        side.group.leave(LeaveGroup(1))


def batch(seed: int, *, takes_other: bool = True, again: bool = False) -> Any:
    rows = torch.randint(ROWS, (6,), generator=torch.Generator().manual_seed(seed))
    return (rows, takes_other, again)


def in_both(sides: list[Side], work: Any) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, sides))


def sums_of(
    sides: list[Side], vectors: list[Any], weights: tuple[float, float] = (3.0, 4.0)
) -> list[Reduced]:
    return in_both(sides, lambda side: side.sum(vectors[side.slot], weights[side.slot]))


@pytest.mark.oracle("allreduce", "sums that begin when gradients are whole")
@pytest.mark.parametrize("kind", ["all", "some get none", "in parts", "used twice"])
def test_what_is_summed_early_is_the_sum_of_whole_gradients(both, agree, kind):
    def batches_of(side: Side) -> list[Any]:
        takes_other = kind != "some get none" or side.slot == 0
        batches = [batch(side.slot, takes_other=takes_other, again=kind == "used twice")]
        return batches + [batch(5 + side.slot, takes_other=False)] * 2 * (kind == "in parts")

    whole = [side.gradient(batches_of(side), sums=False).copy() for side in both]
    for number in range(2):  # The second one uses the memory of the first.
        early = in_both(both, lambda side: side.gradient(batches_of(side), sums=True))
        begun = [side.group._member._early for side in both]
        assert len({len(each.works) for each in begun} | {len(each.cuts) for each in begun}) == 1
        assert len(begun[0].works) > 2
        # Who has been wrong once begins nothing before the end of the pass.
        assert {each.is_void for each in begun} == {kind == "used twice" and number == 0}
        for ours, theirs in zip(early, whole, strict=True):
            assert np.array_equal(ours, theirs)  # What is kept for another group.
        first, second = sums_of(both, early)
        assert np.array_equal(first.vector, second.vector)
        assert (first.weight, first.is_counted) == (7.0, True)
        agree(first.vector, 3 * whole[0] + 4 * whole[1], atol=1e-6)


def test_parts_are_begun_before_the_backward_pass_has_ended(both):
    seen: list[int] = []
    (side, other) = both
    side.stepper.replica.model.words.weight.register_post_accumulate_grad_hook(
        lambda _: seen.append(len(side.group._member._early.works))
    )
    in_both(both, lambda side: side.gradient([batch(1)], sums=True))
    assert seen[0] > 0
    assert other.group.begin_sum(3, 1.0) is None  # It has begun one, which is of no use now.
    assert other.group._member._early.is_void


@pytest.mark.parametrize("early", [(True, True), (True, False), (False, True)])
def test_a_sum_of_something_else_than_was_begun_is_made_anew(both, early):
    """And so is one whose weight is another, as that of a gradient of no use."""
    vectors = in_both(both, lambda side: side.gradient([batch(1)], sums=early[side.slot]).copy())
    results = sums_of(both, vectors, (1.0, 2.0))
    for result in results:
        np.testing.assert_allclose(result.vector, vectors[0] + 2 * vectors[1], atol=1e-6)
    again = in_both(both, lambda side: side.gradient([batch(2)], sums=True))
    results = sums_of(both, again)
    np.testing.assert_allclose(results[1].vector, 3 * again[0] + 4 * again[1], atol=1e-6)


def test_who_has_begun_nothing_gives_what_it_brings_or_nothing(both):
    for weight in (4.0, 0.0):
        vectors = in_both(both, lambda side: side.gradient([batch(1)], sums=side.slot == 0))
        if not weight:
            vectors[1] = np.full_like(vectors[1], np.nan)
        results = sums_of(both, vectors, (3.0, weight))
        wanted = 3 * vectors[0] + (4 * vectors[1] if weight else 0)
        for result in results:
            np.testing.assert_allclose(result.vector, wanted, atol=1e-6)


@pytest.mark.parametrize(
    "both", [{"clip_norm": 1e-3, "clip": "replica"}, {"precision": "fp16"}], indirect=True
)
def test_a_gradient_that_is_changed_as_a_whole_is_not_begun(both):
    side = both[0]
    gradient = side.gradient([batch(1)], sums=True)
    assert side.group._member._early is None
    assert np.isfinite(gradient).all()
