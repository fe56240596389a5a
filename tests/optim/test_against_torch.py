"""The same 50 gradients through our optimisers and through torch's give the same parameters.

Not bit for bit: torch fuses a multiplication with an addition here and there, which rounds once
where numpy rounds twice. Each element may differ by 1e-6 of the largest value that it had on
its way: about eight units in the last place of float32.
"""

import numpy as np
import pytest
import torch
from update_loops import loops as loops

from dlctl.compress.base import Delta
from dlctl.optim.adagrad import Adagrad
from dlctl.optim.adam import Adam, AdamW
from dlctl.optim.momentum import Momentum
from dlctl.optim.rmsprop import RMSprop
from dlctl.optim.sgd import SGD
from dlctl.shards.memory import in_memory

SIZE, STEPS = 500, 50
TORCH_NAMES = {
    "momentum": ("momentum_buffer",),
    "sum": ("sum",),
    "mean": ("exp_avg",),
    "square": ("exp_avg_sq", "square_avg"),
}


@pytest.fixture(autouse=True)
def _checked_sparse_tensors():
    """torch's sparse optimisers warn unless one says whether tensors are to be checked."""
    with torch.sparse.check_sparse_tensor_invariants(True):
        yield


PAIRS = {
    "sgd": (SGD, {"lr": 0.1}, torch.optim.SGD, {"lr": 0.1}),
    "sgd with decay": (
        SGD,
        {"lr": 0.1, "weight_decay": 0.01},
        torch.optim.SGD,
        {"lr": 0.1, "weight_decay": 0.01},
    ),
    "momentum": (
        Momentum,
        {"lr": 0.01, "momentum": 0.9},
        torch.optim.SGD,
        {"lr": 0.01, "momentum": 0.9},
    ),
    "nesterov": (
        Momentum,
        {"lr": 0.01, "momentum": 0.8, "nesterov": True},
        torch.optim.SGD,
        {"lr": 0.01, "momentum": 0.8, "nesterov": True},
    ),
    "nesterov with decay": (
        Momentum,
        {"lr": 0.01, "nesterov": True, "weight_decay": 0.1},
        torch.optim.SGD,
        {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "momentum with decay": (
        Momentum,
        {"lr": 0.01, "weight_decay": 0.1},
        torch.optim.SGD,
        {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1},
    ),
    "adagrad": (Adagrad, {"lr": 0.05}, torch.optim.Adagrad, {"lr": 0.05}),
    "adagrad with an accumulator": (
        Adagrad,
        {"lr": 0.05, "initial_accumulator": 0.1, "eps": 1e-6},
        torch.optim.Adagrad,
        {"lr": 0.05, "initial_accumulator_value": 0.1, "eps": 1e-6},
    ),
    "adam": (Adam, {}, torch.optim.Adam, {}),
    "adam with its own betas": (
        Adam,
        {"lr": 0.01, "beta1": 0.5, "beta2": 0.9, "eps": 1e-6},
        torch.optim.Adam,
        {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-6},
    ),
    "adam with decay": (
        Adam,
        {"lr": 0.01, "weight_decay": 0.1},
        torch.optim.AdamW,
        {"lr": 0.01, "weight_decay": 0.1},
    ),
    "adamw": (AdamW, {}, torch.optim.AdamW, {}),
    "rmsprop": (RMSprop, {}, torch.optim.RMSprop, {}),
    "rmsprop with momentum": (
        RMSprop,
        {"lr": 0.003, "alpha": 0.9, "momentum": 0.9, "eps": 1e-6},
        torch.optim.RMSprop,
        {"lr": 0.003, "alpha": 0.9, "momentum": 0.9, "eps": 1e-6},
    ),
}


def start():
    return np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)


def gradients():
    """Of sizes from 1e-3 to 1e3, now and then zero."""
    rng = np.random.default_rng(1)
    scale = 10 ** rng.uniform(-3, 3, SIZE)
    for _ in range(STEPS):
        g = rng.standard_normal(SIZE) * scale
        g[rng.random(SIZE) < 0.1] = 0
        yield g.astype(np.float32)


class Journey:
    """The vectors of one optimiser, and for each element the largest magnitude on its way."""

    def __init__(self, optimizer, w):
        self.shard = in_memory(optimizer, w)
        self.vectors = {"w": w, **self.shard.slots}
        self.largest = {name: np.abs(vector) for name, vector in self.vectors.items()}

    def apply(self, delta):
        self.shard.apply(delta)
        for name, vector in self.vectors.items():
            np.maximum(self.largest[name], np.abs(vector), out=self.largest[name])

    def assert_ends_at(self, name, theirs, tolerance=1e-6):
        difference = np.abs(self.vectors[name] - theirs.detach().numpy())
        assert np.all(difference <= tolerance * self.largest[name])


@pytest.mark.parametrize("pair", PAIRS)
def test_fifty_steps_end_where_torch_ends(pair):
    ours, our_options, theirs, their_options = PAIRS[pair]
    journey = Journey(ours(ours.Options(**our_options)), start())
    parameter = torch.nn.Parameter(torch.from_numpy(start()))
    reference = theirs([parameter], **their_options)
    for g in gradients():
        journey.apply(Delta(g))
        parameter.grad = torch.from_numpy(g)
        reference.step()
    journey.assert_ends_at("w", parameter)
    theirs_by_name = reference.state[parameter]
    for name in journey.shard.slots:
        for their_name in theirs_by_name.keys() & TORCH_NAMES[name]:
            journey.assert_ends_at(name, theirs_by_name[their_name])


@pytest.mark.parametrize("seed", range(3))
def test_a_rate_that_changes_on_the_way_changes_as_in_torch(seed):
    rates = np.random.default_rng(seed).uniform(0.001, 0.1, STEPS)
    journey = Journey(Adam(Adam.Options()), start())
    parameter = torch.nn.Parameter(torch.from_numpy(start()))
    reference = torch.optim.Adam([parameter])
    for g, rate in zip(gradients(), rates, strict=True):
        journey.shard.optimizer.lr = reference.param_groups[0]["lr"] = float(rate)
        journey.apply(Delta(g))
        parameter.grad = torch.from_numpy(g)
        reference.step()
    journey.assert_ends_at("w", parameter)


def sparse_pushes():
    rng = np.random.default_rng(2)
    for g in gradients():
        where = np.flatnonzero(rng.random(SIZE) < 0.1)
        yield Delta(g[where], where)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(SGD, torch.optim.SGD), (Adagrad, torch.optim.Adagrad)]
)
def test_fifty_sparse_pushes_end_where_torch_ends_with_sparse_gradients(ours, theirs):
    journey = Journey(ours(ours.Options(lr=0.05)), start())
    parameter = torch.nn.Parameter(torch.from_numpy(start()))
    reference = theirs([parameter], lr=0.05)
    for delta in sparse_pushes():
        journey.apply(delta)
        parameter.grad = as_torch(delta)
        reference.step()
    journey.assert_ends_at("w", parameter)


def test_sparse_pushes_to_adam_are_lazy_as_in_torch_sparse_adam():
    # SparseAdam adds eps before the bias correction, Adam after it: with a tiny eps both agree.
    journey = Journey(Adam(Adam.Options(lr=0.01, eps=1e-20)), start())
    parameter = torch.nn.Parameter(torch.from_numpy(start()))
    reference = torch.optim.SparseAdam([parameter], lr=0.01, eps=1e-20)
    for delta in sparse_pushes():
        delta.values[delta.values == 0] = 1  # 0 / eps is not what this is about
        journey.apply(delta)
        parameter.grad = as_torch(delta)
        reference.step()
    journey.assert_ends_at("w", parameter, tolerance=1e-5)
    assert journey.shard.optimizer.counters == {"updates": STEPS}


def as_torch(delta):
    return torch.sparse_coo_tensor(
        torch.from_numpy(delta.indices)[None],
        torch.from_numpy(delta.values),
        (SIZE,),
    )
