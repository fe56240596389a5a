"""Ringleader ASGD against numpy: rounds, means of means, and how old a gradient can get."""

from __future__ import annotations

import json

import numpy as np
import pytest
from by_hand import SHARD_TERM

from dlctl.algorithms.methods.ringleader import Options, RingleaderServer
from dlctl.compress.base import Delta
from dlctl.optim.sgd import SGD, SGDOptions
from dlctl.shards.base import Shard, Spec
from dlctl.shards.image import ImageForm
from dlctl.shards.journaled import Journaled
from dlctl.shards.mapped import Mapped
from dlctl.shards.memory import in_memory
from dlctl.sim.states import MemoryLog
from dlctl.wire.messages import APPLIED, BUFFERED, Array, Packed, Push

SIZE, LR = 5, 0.1


def rule_of(workers: int) -> object:
    return RingleaderServer.optimizer(Options(), SGD(SGDOptions(lr=LR)), workers)


def new_side(workers: int, members: int | None = None) -> RingleaderServer:
    side = RingleaderServer(Options(), in_memory(rule_of(workers), np.ones(SIZE, np.float32)))
    side.members(frozenset(range(members or workers)))
    return side


def push(
    side: RingleaderServer, slot: int, gradient: Array, base: int = 0, samples: int = 8
) -> tuple[str, int]:
    packed = Packed("none", SIZE, (gradient,))
    message = Push(slot, 1, SHARD_TERM, 0, base, 0, 0, samples, 0, packed, 0)
    (outcome,) = side.push(message, Delta(gradient))
    return outcome.kind, outcome.staleness


class Rules:
    """In numpy: entries are lists of (gradient, the updates when its parameters were read)."""

    def __init__(self, workers: int) -> None:
        self.n = workers
        self.x, self.k = np.ones(SIZE), 0
        self.now: list[list[tuple[Array, int]]] = [[] for _ in range(workers)]
        self.next: list[list[tuple[Array, int]]] = [[] for _ in range(workers)]
        self.updated: set[int] = set()
        self.read_at = [0] * workers
        self.oldest = 0

    def push(self, i: int, gradient: Array) -> bool:
        if i in self.updated:
            self.next[i].append((gradient, self.read_at[i]))
            return False
        self.now[i].append((gradient, self.read_at[i]))
        if not self.updated and not all(self.now):
            return False
        means = [np.mean([g for g, _ in entry], axis=0) for entry in self.now]
        self.x = self.x - LR * np.mean(means, axis=0)
        self.oldest = max(self.oldest, *(self.k - at for entry in self.now for _, at in entry))
        self.k += 1
        self.read_at[i] = self.k
        self.updated.add(i)
        if len(self.updated) == self.n:
            self.now, self.next = self.next, [[] for _ in range(self.n)]
            self.updated = set()
        return True


@pytest.mark.oracle("ringleader", "the mean of the workers' means in float64")
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_it_is_the_mean_of_the_workers_means_and_no_gradient_is_older_than_said(workers, agree):
    side, rules, rng = new_side(workers), Rules(workers), np.random.default_rng(workers)
    base = [0] * workers
    speeds = 1.0 / (1 + np.arange(workers)) ** 2
    for _ in range(80 * workers):
        slot = int(rng.choice(workers, p=speeds / speeds.sum()))
        gradient = rng.standard_normal(SIZE).astype(np.float32)
        tau = rules.k - rules.read_at[slot]
        is_update = rules.push(slot, gradient)
        assert push(side, slot, gradient, base[slot]) == (APPLIED if is_update else BUFFERED, tau)
        if is_update:
            base[slot] = side.shard.version
        agree(side.shard.w, rules.x, rtol=1e-5, atol=1e-5)
    assert rules.k >= 3 * workers
    assert rules.oldest <= max(0, 2 * workers - 2)


@pytest.mark.oracle("ringleader", "SGD alone, one worker")
def test_with_one_worker_it_is_the_optimiser_alone(agree):
    side, g = new_side(1), np.linspace(-1, 1, SIZE, dtype=np.float32)
    assert [push(side, 0, g)[0] for _ in range(3)] == [APPLIED] * 3
    agree(side.shard.w, 1 - 3 * LR * g, rtol=1e-6)


def test_the_dead_and_those_without_data_are_not_waited_for():
    side, g = new_side(3), np.ones(SIZE, np.float32)
    assert [push(side, slot, g)[0] for slot in (0, 1, 0)] == [BUFFERED] * 3
    side.members(frozenset({0, 1}))
    assert push(side, 1, g)[0] == APPLIED, "the first of phase 2"
    assert push(side, 2, 9 * g, samples=0)[0] == APPLIED, "an empty push says that it has no data"
    assert push(side, 1, g)[0] == BUFFERED
    side.members(frozenset({1}))
    assert push(side, 1, g)[0] == BUFFERED, "it ends the round, and is of the next one"
    assert push(side, 1, 4 * g)[0] == APPLIED
    np.testing.assert_allclose(side.shard.w, 1 - LR - LR * (1 + 1 + 4) / 3, rtol=1e-5)


def test_workers_beyond_the_job_s_count_share_entries():
    side, g = new_side(2, members=3), np.ones(SIZE, np.float32)
    assert push(side, 2, g)[0] == BUFFERED
    assert push(side, 1, g)[0] == APPLIED
    assert push(side, 0, g)[0] == APPLIED
    np.testing.assert_allclose(side.shard.w, 1 - 2 * LR, rtol=1e-5)


@pytest.mark.parametrize("kind", ["mapped", "journaled"])
def test_the_table_survives_with_the_shard(kind):
    workers = 3
    spec = Spec("run", 0, 0, SIZE, rule_of(workers).slots)
    buffer, log = bytearray(ImageForm.of(spec, "boot").total_bytes), MemoryLog()
    is_mapped = kind == "mapped"
    storage = Mapped.create(buffer, spec, "boot") if is_mapped else Journaled.create(log, spec)
    side, rng = (
        RingleaderServer(Options(), Shard(rule_of(workers), storage)),
        np.random.default_rng(3),
    )
    side.members(frozenset(range(workers)))
    other = new_side(workers)
    side.shard.storage.fill({"w": np.ones(SIZE, np.float32)}, None)
    side.shard.commit({"side": side.state()})
    for number in range(40):
        slot, gradient = int(rng.integers(workers)), rng.standard_normal(SIZE).astype(np.float32)
        assert push(side, slot, gradient)[0] == push(other, slot, gradient)[0]
        side.shard.commit({"side": json.loads(json.dumps(side.state()))})
        if number % 3 == 2:
            storage = Mapped.reopen(buffer, spec, "boot") if is_mapped else Journaled(log, spec)
            side = RingleaderServer(Options(), Shard(rule_of(workers), storage))
            side.resume(side.shard.resume()["side"])
            side.members(frozenset(range(workers)))
    assert side.shard.w.tobytes() == other.shard.w.tobytes()
    assert (side.shard.w != 1).all()
