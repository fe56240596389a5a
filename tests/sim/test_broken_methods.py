"""What the tool that tries a method finds in methods that learn, and are wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from lone_replica import differences
from try_method import DEATHS, SAMPLES, has_own_rule, tried

from dlctl import registry
from dlctl.algorithms import barrier, stepwise
from dlctl.algorithms.barrier import Barrier
from dlctl.algorithms.base import Method, Needs, PushOutcome, ReplicaSide
from dlctl.algorithms.means import Mean, even_shares
from dlctl.algorithms.methods.downpour import DOWNPOUR, Server
from dlctl.algorithms.methods.local_sgd import LOCAL_SGD
from dlctl.algorithms.methods.softsync import SOFTSYNC, SoftsyncServer
from dlctl.algorithms.methods.sync import SYNC
from dlctl.algorithms.needs import Gradient
from dlctl.compress.base import Delta
from dlctl.sim.faults import Faults
from dlctl.wire import messages

EPOCHS = 16
ALL = EPOCHS * SAMPLES
Try = Callable[..., str]


@pytest.fixture
def name_it(monkeypatch: pytest.MonkeyPatch) -> Callable[[Method], None]:
    def name_it(method: Method) -> None:
        """As "mine"."""
        module = ModuleType("broken")
        module.MINE = method  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "broken", module)
        entry = registry.Component("broken:MINE", "an example")
        monkeypatch.setitem(registry.BUILT_IN["algorithms"], "mine", entry)

    return name_it


@pytest.fixture
def try_it(name_it: Callable[[Method], None]) -> Try:
    def try_it(method: Method, faults: Faults | None = None, **options: Any) -> str:
        name_it(method)
        return tried("mine", options, 0, faults, 1.0 if "inner_lr" in options else 0.03, EPOCHS)

    return try_it


class Twice(Server):
    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        self.shard.apply(delta, push.samples)
        return super().push(push, delta)


class TwiceCountedOnce(Server):
    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        self.shard.apply(delta, 0)
        return super().push(push, delta)


class LeavingOut(Server):
    """The second shard forgets the pushes of one replica."""

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        if self.lo and push.slot == 2:
            self.shard.version += 1
            return [push.outcome(messages.APPLIED)]
        return super().push(push, delta)


class MeanOfMeans(Mean):
    def shares(self, pushes: Any) -> list[np.float32]:
        return even_shares(pushes)


class TwiceTheMean(Barrier):
    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        return super().push(push, delta._replace(values=2 * delta.values))


class NeverTheLast(ReplicaSide):
    """Pushes a gradient when the next one has been computed."""

    def run(self) -> Needs:
        clock, kept, samples = (yield from barrier.join()), None, 0
        while True:
            computed = yield Gradient()
            if computed is not None:
                if kept is not None:
                    self.accrue(kept)
                yield stepwise.write(self, samples, clock)
                kept, samples = computed.gradient.copy(), computed.samples
            else:
                yield stepwise.write(self, 0, clock)
            clock = yield from barrier.next_step(clock)


class WaitingForNobody(Barrier):
    """For a replica that is not there."""

    def members(self, slots: frozenset[int]) -> list[PushOutcome]:
        return super().members(slots | {7})


class ByPlace(SoftsyncServer):
    """A rule of its own, which is another one for the second shard."""

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        factor = np.float32(0.9 if self.lo else 1.0)
        return super().push(push, delta._replace(values=factor * delta.values))


class Forgetting(SoftsyncServer):
    """Takes smaller steps the more there were, and saves nothing of that."""

    def __init__(self, options: Any, shard: Any) -> None:
        super().__init__(options, shard)
        self.count = 0

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        self.count += 1
        factor = np.float32(1 / self.count**0.5)
        return super().push(push, delta._replace(values=factor * delta.values))


@pytest.mark.parametrize("method", [DOWNPOUR, SYNC])
def test_in_a_method_that_is_right_it_finds_nothing(try_it: Try, method: Method) -> None:
    assert try_it(method) == ""


@pytest.mark.long
def test_a_push_that_is_applied_twice(try_it: Try) -> None:
    found = try_it(replace(DOWNPOUR, shard=Twice))
    assert f"server-0 counts {2 * ALL} samples" in found
    assert f"{ALL} as applied" in found
    assert "samples" in try_it(replace(DOWNPOUR, shard=Twice), DEATHS)


@pytest.mark.parametrize(
    "method", [replace(DOWNPOUR, shard=TwiceCountedOnce), replace(SYNC, shard=TwiceTheMean)]
)
def test_one_that_is_counted_once(try_it: Try, method: Method) -> None:
    assert "not what the pushes add up to" in try_it(method)


def test_a_displacement_that_is_applied_twice(try_it: Try) -> None:
    found = try_it(replace(LOCAL_SGD, shard=TwiceTheMean), local_steps=4, inner_lr=0.003)
    assert "not what the pushes add up to" in found


@pytest.mark.long
def test_a_shard_without_the_pushes_of_one_replica(try_it: Try) -> None:
    found = try_it(replace(DOWNPOUR, shard=LeavingOut))
    assert "server-1 counts" in found
    assert f"{ALL} as applied" in found


@pytest.mark.long
def test_a_mean_by_replicas_where_one_by_samples_is_declared(try_it: Try) -> None:
    found = try_it(replace(SYNC, shard=Barrier, mean=MeanOfMeans))
    assert "not what one process makes of the same batches" in found


@pytest.mark.long
def test_a_replica_that_keeps_its_last_gradient(try_it: Try) -> None:
    found = try_it(replace(SYNC, shard=Barrier, replica=NeverTheLast))
    assert f"computed {ALL} samples, and pushed {ALL - 3 * 4} to server-0" in found


def test_a_barrier_that_does_not_come_says_which_clock_is_waited_for(try_it: Try) -> None:
    found = try_it(replace(SYNC, shard=WaitingForNobody))
    assert "worker-0 waits for clock 1 of server-1, which is at 0" in found
    assert "server-0 waits at clock 0 for pushes of worker-7" in found


@pytest.mark.per_commit(1)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("softsync", {}), ("fedbuff", {"inner_lr": 0.03, "local_steps": 4, "buffer_pushes": 3}),
        ("ssp", {}), ("dc-asgd", {}), ("ringmaster", {}), ("ringmaster-lmo", {}),
        ("ringleader", {}), ("easgd-atomic", {}),
    ],
)  # fmt: skip
def test_in_a_rule_of_its_own_that_is_right_it_finds_nothing(
    name: str, options: dict[str, Any]
) -> None:
    assert has_own_rule(registry.load("algorithms", name), options)
    assert differences(name, options, "sgd", 0.03, 0) == []


@pytest.mark.parametrize(
    ("shard", "what"), [(ByPlace, "on one server"), (Forgetting, "when it was stopped in between")]
)
def test_a_rule_of_its_own_that_is_wrong_ends_elsewhere(
    name_it: Callable[[Method], None], shard: type[SoftsyncServer], what: str
) -> None:
    name_it(replace(SOFTSYNC, shard=shard))
    (found,) = differences("mine", {}, "sgd", 0.03, 0)
    assert what in found
