"""DC-ASGD against numpy: the correction, whose copy it is made with, and what a worker reads."""

from __future__ import annotations

import json

import numpy as np
import pytest
from by_hand import SHARD_TERM

from dlctl.algorithms.methods.dc_asgd import EPS, MEAN_SQUARE, Options, Server
from dlctl.compress.base import Delta
from dlctl.optim.momentum import Momentum
from dlctl.optim.sgd import SGD, SGDOptions
from dlctl.shards.base import Shard, Spec
from dlctl.shards.image import ImageForm
from dlctl.shards.journaled import Journaled
from dlctl.shards.mapped import Mapped
from dlctl.shards.memory import in_memory
from dlctl.sim.states import MemoryLog
from dlctl.wire.messages import APPLIED, Array, Packed, Push

SIZE, LR, WORKERS = 7, 0.1, 3
CONSTANT, ADAPTIVE = Options(lambda_0=0.5), Options(variance="adaptive", lambda_0=2.0)
both = pytest.mark.parametrize("options", [CONSTANT, ADAPTIVE], ids=["constant", "adaptive"])


def rule_of(options: Options) -> object:
    return Server.optimizer(options, SGD(SGDOptions(lr=LR)), WORKERS)


def new_side(options: Options) -> Server:
    return Server(options, in_memory(rule_of(options), np.ones(SIZE, np.float32)))


def push(side: Server, slot: int, gradient: Array, where: Array | None = None) -> str:
    """Without a gradient it takes its copy."""
    base = side.shown(slot)
    samples = 8 if gradient.any() else 0
    packed = Packed("none", SIZE, (gradient,))
    version = base[0] if base else side.shard.version
    message = Push(slot, 1, SHARD_TERM, 0, version, 0, 0, samples, 0, packed, 0)
    (outcome,) = side.push(message, Delta(gradient, where))
    return outcome.kind


class Paper:
    """In numpy, float64; what is read is what the last push has made."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.w, self.mean_square = np.ones(SIZE), np.zeros(SIZE)
        self.copies: dict[int, Array] = {}

    def push(self, slot: int, g: Array) -> None:
        g = g.astype(float)
        strength: float | Array = self.options.lambda_0
        if self.options.variance == "adaptive":
            decay = self.options.mean_square_decay
            self.mean_square = decay * self.mean_square + (1 - decay) * g * g
            strength = self.options.lambda_0 / np.sqrt(self.mean_square + EPS)
        corrected = g + strength * g * g * (self.w - self.copies[slot]) if slot < WORKERS else g
        self.w = self.w - LR * corrected
        self.copies[slot] = self.w.copy()


@pytest.mark.oracle("dc-asgd", "the rule of Zheng 2017 in float64")
@both
@pytest.mark.parametrize("is_sparse", [False, True])
def test_it_is_the_paper_s_rule(options, is_sparse, agree):
    """The worker of slot 3 is one more than the job has copies for."""
    side, paper, rng = new_side(options), Paper(options), np.random.default_rng(1)
    for slot in range(WORKERS + 1):
        assert push(side, slot, np.zeros(SIZE, np.float32)) == APPLIED
        paper.copies[slot] = paper.w.copy()
    for _ in range(40):
        slot = int(rng.integers(WORKERS + 1))
        g = rng.standard_normal(SIZE).astype(np.float32)
        where = np.sort(rng.choice(SIZE, 3, replace=False)) if is_sparse else None
        if where is not None:
            g, values = np.zeros(SIZE, np.float32), g[where]
            g[where] = values
            push(side, slot, values, where)
        else:
            push(side, slot, g)
        paper.push(slot, g)
        agree(side.shard.w, paper.w, rtol=1e-5, atol=1e-6)
        for reader in range(WORKERS):
            version, copy = side.shown(reader)
            assert version <= side.shard.version
            agree(copy, paper.copies[reader], rtol=1e-5, atol=1e-6)
        assert side.shown(WORKERS) is None
    if options is ADAPTIVE:
        agree(side.shard.slots[MEAN_SQUARE], paper.mean_square, rtol=1e-5, atol=1e-6)


@pytest.mark.oracle("dc-asgd", "SGD alone, where no gradient is stale")
@both
def test_a_gradient_of_the_present_parameters_is_not_corrected(options, agree):
    side = new_side(options)
    g = np.linspace(-1, 1, SIZE, dtype=np.float32)
    push(side, 0, np.zeros(SIZE, np.float32))
    w = np.ones(SIZE, np.float32)
    for _ in range(5):
        push(side, 0, g)
        w = w - np.float32(LR) * g
    agree(side.shard.w, w, rtol=1e-6)


def test_to_take_a_copy_is_no_step_of_the_optimiser():
    rule = Server.optimizer(CONSTANT, Momentum(Momentum.Options(lr=LR)), WORKERS)
    side = Server(CONSTANT, in_memory(rule, np.ones(SIZE, np.float32)))
    push(side, 0, np.ones(SIZE, np.float32))
    w, velocity = side.shard.w.copy(), side.shard.slots["momentum"].copy()
    push(side, 1, np.zeros(SIZE, np.float32))
    assert side.shard.w.tolist() == w.tolist()
    assert side.shard.slots["momentum"].tolist() == velocity.tolist()
    assert side.shown(1)[1].tolist() == w.tolist()


@both
@pytest.mark.parametrize("kind", ["mapped", "journaled"])
def test_the_copies_survive_with_the_shard(options, kind):
    spec = Spec("run", 0, 0, SIZE, rule_of(options).slots)
    buffer, log = bytearray(ImageForm.of(spec, "boot").total_bytes), MemoryLog()
    is_mapped = kind == "mapped"
    storage = Mapped.create(buffer, spec, "boot") if is_mapped else Journaled.create(log, spec)
    side, rng = Server(options, Shard(rule_of(options), storage)), np.random.default_rng(2)
    other = new_side(options)
    side.shard.storage.fill({"w": np.ones(SIZE, np.float32)}, None)
    side.shard.commit({"side": side.state()})
    for number in range(20):
        slot = number % WORKERS
        gradient = rng.standard_normal(SIZE).astype(np.float32) * (number >= WORKERS)
        for each in (side, other):
            push(each, slot, gradient)
        side.shard.commit({"side": json.loads(json.dumps(side.state()))})
        if number % 4 == 3:
            storage = Mapped.reopen(buffer, spec, "boot") if is_mapped else Journaled(log, spec)
            side = Server(options, Shard(rule_of(options), storage))
            side.resume(side.shard.resume()["side"])
    assert side.shard.w.tobytes() == other.shard.w.tobytes()
    for slot in range(WORKERS):
        assert side.shown(slot)[0] == other.shown(slot)[0]
        assert side.shown(slot)[1].tobytes() == other.shown(slot)[1].tobytes()
