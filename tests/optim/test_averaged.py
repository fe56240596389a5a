"""The moving average behind an optimiser: torch's, on every storage, over restarts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from kept_states import dense, snapshot, sparse
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dlctl.compress.base import Delta
from dlctl.optim.averaged import Averaged
from dlctl.optim.buffered import Buffered
from dlctl.optim.momentum import Momentum
from dlctl.shards.base import Shard, Spec
from dlctl.shards.image import ImageForm
from dlctl.shards.journaled import Journaled
from dlctl.shards.mapped import Mapped
from dlctl.shards.memory import InMemory
from dlctl.sim.states import MemoryLog
from dlctl.util.names import AVERAGE
from dlctl.util.threads import BLOCK

SIZE, EMA, LR, MOMENTUM = BLOCK + 17, 0.9, 0.05, 0.8
START = np.linspace(-1, 1, SIZE, dtype=np.float32)
UPDATES = [dense(1, SIZE), sparse(2, SIZE, 900), dense(3, SIZE), sparse(4, SIZE, 0), dense(5, SIZE)]


def averaged() -> Any:
    return Averaged(Momentum(Momentum.Options(lr=LR, momentum=MOMENTUM)), EMA)


def full(delta: Delta) -> np.ndarray:
    if delta.indices is None:
        return delta.values
    values = np.zeros(SIZE, np.float32)
    values[delta.indices] = delta.values
    return values


def begun(shard: Shard) -> Shard:
    shard.storage.fill(shard.begins_with(START), None)
    shard.commit({})
    return shard


def test_it_is_torch_s_on_every_storage_over_restarts() -> None:
    spec = Spec("run", 0, 0, SIZE, averaged().slots)
    buffer, log = bytearray(ImageForm.of(spec, "boot").total_bytes), MemoryLog()
    reopen = (
        lambda: Mapped.reopen(buffer, spec, "boot"),
        lambda: Journaled(log, spec),
    )
    storages = Mapped.create(buffer, spec, "boot"), Journaled.create(log, spec)
    shards = [begun(Shard(averaged(), storage)) for storage in storages]
    model = torch.nn.Linear(SIZE, 1, bias=False)
    model.weight.data = torch.from_numpy(START.copy())[None]
    script = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA))
    average.update_parameters(model)  # The first time it takes what is there.
    for number, delta in enumerate(UPDATES):
        model.weight.grad = torch.from_numpy(full(delta).copy())[None]
        script.step()
        average.update_parameters(model)
        wanted = average.module.weight.detach().numpy()[0]
        for shard in shards:
            shard.apply(delta)
            shard.commit({})
        if number % 2:
            shards = [Shard(averaged(), make()) for make in reopen]
            assert [shard.resume() for shard in shards] == [{}, {}]
        for shard in shards:
            assert np.allclose(shard.slots[AVERAGE], wanted, rtol=0, atol=1e-6), number
            assert np.allclose(shard.w, model.weight.detach().numpy()[0], rtol=0, atol=1e-6)


def test_an_update_that_is_begun_while_it_comes_has_the_same_average() -> None:
    spec = Spec("run", 0, 0, SIZE, averaged().slots)
    buffer = bytearray(ImageForm.of(spec, "boot").total_bytes)
    plain = begun(Shard(averaged(), InMemory().create(spec)))
    shard = begun(Shard(averaged(), Mapped.create(buffer, spec, "boot")))
    for seed in range(3):
        values = dense(seed, SIZE).values
        assert all(shard.prepare(values, n, is_new=n == 500) for n in (500, BLOCK + 3))
        for each in (plain, shard):
            each.apply(Delta(values))
            each.commit({})
        assert snapshot(shard) == snapshot(plain)


def test_what_is_only_buffered_does_not_move_it() -> None:
    optimizer = Buffered(averaged(), 2)
    shard = begun(Shard(optimizer, InMemory().create(Spec("run", 0, 0, SIZE, optimizer.slots))))
    shard.apply(UPDATES[0])
    assert np.array_equal(shard.slots[AVERAGE], START)
    shard.apply(UPDATES[1])
    assert np.allclose(shard.slots[AVERAGE], EMA * START + (1 - EMA) * shard.w, rtol=0, atol=1e-6)
