"""n-softsync against numpy: what is one update, and how much an old gradient counts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from by_hand import SHARD_TERM

from dlctl import jobfile
from dlctl.algorithms.methods.softsync import Options, SoftsyncServer
from dlctl.compress.base import Delta
from dlctl.errors import UsageError
from dlctl.optim.sgd import SGD, SGDOptions
from dlctl.shards.base import Shard
from dlctl.shards.memory import in_memory
from dlctl.wire.messages import APPLIED, BUFFERED, Array, Packed, Push

SIZE, LR = 5, 0.1


def shard_of(options: Options) -> Shard:
    rule = SoftsyncServer.optimizer(options, SGD(SGDOptions(lr=LR)), workers=4)
    return in_memory(rule, np.ones(SIZE, np.float32))


def new_side(workers: int, **options: int) -> SoftsyncServer:
    side = SoftsyncServer(Options(**options), shard_of(Options(**options)))
    side.members(frozenset(range(workers)))
    return side


def push(side: SoftsyncServer, gradient: Array, base_version: int) -> tuple[str, int]:
    packed = Packed("none", SIZE, (gradient,))
    message = Push(0, 1, SHARD_TERM, 0, base_version, 0, 0, 8, 0, packed, 0)
    (outcome,) = side.push(message, Delta(gradient))
    return outcome.kind, outcome.staleness


@pytest.mark.oracle("softsync", "the rule of Zhang 2016 in float64")
@pytest.mark.parametrize("modulated", [True, False])
@pytest.mark.parametrize(("workers", "n"), [(6, 1), (6, 2), (6, 4), (6, 6), (7, 3)])
def test_it_is_the_paper_s_rule(workers, n, modulated, agree):
    side, rng = new_side(workers, n=n, modulated=modulated), np.random.default_rng(workers * n)
    c, w, buffer, held, updates = workers // n, np.ones(SIZE), np.zeros(SIZE), 0, 0
    updates_at = [0]
    """Version -> the updates before it."""
    for _ in range(60):
        base = int(rng.integers(max(0, len(updates_at) - 3 * workers), len(updates_at)))
        gradient = rng.standard_normal(SIZE).astype(np.float32)
        tau = updates - updates_at[base]
        buffer += gradient / (max(tau, 1) if modulated else 1)
        held += 1
        if is_full := held == c:
            w -= LR * buffer / c
            buffer[:], held, updates = 0, 0, updates + 1
        updates_at.append(updates)
        assert push(side, gradient, base) == (APPLIED if is_full else BUFFERED, tau)
    agree(side.shard.w, w, rtol=1e-5, atol=1e-6)


def test_with_fewer_learners_the_next_push_completes_what_is_there():
    side = new_side(4, n=1)
    ones = np.ones(SIZE, np.float32)
    assert [push(side, k * ones, 0)[0] for k in (1, 2, 4)] == [BUFFERED] * 3
    side.members(frozenset({0, 1}))
    assert push(side, 5 * ones, 3) == (APPLIED, 0)
    np.testing.assert_allclose(side.shard.w, 1 - LR * (1 + 2 + 4 + 5) / 4, rtol=1e-6)
    assert push(side, ones, 3) == (BUFFERED, 1)
    assert push(side, ones, 5) == (APPLIED, 0)
    np.testing.assert_allclose(side.shard.w, 1 - LR * 3 - LR, rtol=1e-6)


def test_with_more_learners_the_buffer_goes_on():
    side = new_side(2, n=1)
    ones = np.ones(SIZE, np.float32)
    assert push(side, ones, 0)[0] == BUFFERED
    side.members(frozenset(range(4)))
    assert [push(side, ones, 0)[0] for _ in range(3)] == [BUFFERED, BUFFERED, APPLIED]
    assert push(side, ones, 4) == (BUFFERED, 0)
    np.testing.assert_allclose(side.shard.w, 1 - LR, rtol=1e-6)


def test_a_server_that_takes_the_place_goes_on_with_what_is_buffered():
    side, ones = new_side(3, n=1), np.ones(SIZE, np.float32)
    for _ in range(4):
        push(side, ones, 0)
    other = SoftsyncServer(side.options, side.shard)
    other.resume(json.loads(json.dumps(side.state())))
    assert other.state() == side.state()
    assert push(other, ones, 2) == (BUFFERED, 1)
    assert push(other, ones, 3) == (APPLIED, 0)
    np.testing.assert_allclose(side.shard.w, 1 - 2 * LR, rtol=1e-6)


def test_more_updates_than_workers_are_refused(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "job.toml").write_text(
        'job = { name = "a", task = "train.py:task" }\nworkers.count = 4\n'
        'algorithm = { name = "softsync", n = 5 }\n'
    )
    with pytest.raises(UsageError) as error:
        jobfile.load(tmp_path / "job.toml")
    assert [problem.key for problem in error.value.problems] == ["algorithm.n"]
