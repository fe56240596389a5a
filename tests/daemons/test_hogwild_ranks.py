"""A replica of two processes that step in one model: real ones, with this process as rank 0."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from daemons.worker.building import build
from daemons.worker.hogwild.ranks import BatchesAhead
from daemons.worker.ranks.rank_processes import Ranks, RanksEnded
from dlctl.job import config
from dlctl.roles.protocol.effects import Compute

pytestmark = pytest.mark.usefixtures("forked")

TASK = """
    import torch

    def model():
        return torch.nn.EmbeddingBag(24, 1, mode="sum", sparse=True)

    def dataset():
        return torch.utils.data.TensorDataset(torch.arange(24).reshape(24, 1))

    def loss(model, batch):
        return model(batch[0]).sum()  # The gradient of each sample is 1, in a row of its own.
    """
LR, BATCH, BATCHES = 0.5, 2, 6
COMES_S = 60.0


def job(path: Path, clients: int = 0, more: str = "") -> config.JobFile:
    (path / "train.py").write_text(dedent(TASK) + more)
    made = config.JobFile(
        job=config.Job(name="ranks", task=str(path / "train.py:")),
        inner=config.Choice(name="sgd", options={"lr": LR}),
        workers=config.Workers(count=1, device="cpu", threads=2, batch_size=BATCH),
        replica=config.ReplicaProcesses(hogwild=2),
        data=config.Data(clients=clients),
    )
    (path / "job.json").write_text(json.dumps(config.to_dict(made)))
    return made


@pytest.mark.long
@pytest.mark.per_commit(1)
@pytest.mark.parametrize(("clients", "shard"), [(0, -1), (2, 1)], ids=["portions", "clients"])
def test_what_both_move_is_what_the_method_accrues_and_a_death_ends_both(
    clients: int, shard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    events: list[Any] = []
    hogwild = job(tmp_path, clients)  # The rank reads it as soon as it is there.
    ranks = Ranks(
        2, events.append, events.append, argv=(str(tmp_path), "worker-0", "1"),
        ready_s=COMES_S, silent_s=COMES_S,
    )  # fmt: skip
    try:
        ranks.start(slot=0, term=1)
        stepper, loader, *_ = build(hogwild, 0, 0)
        replica = stepper.replica
        ahead = BatchesAhead(ranks, replica, loader.identity)
        before, accrued, by_others = replica.parameters.copy(), np.zeros(24, np.float32), []
        for number in range(BATCHES):
            effect = Compute(0, 0, BATCH * BATCHES, number, LR, shard=shard)
            computed = ahead.take(effect, number, BATCHES, np.zeros(0))
            if computed is None:
                loaded = loader.step(0, 0, BATCH * BATCHES, number, shard)
                step = stepper.step(loaded.batches, own_lr=LR)
                gradient: Any = step.gradient
            else:
                by_others.append(number)
                gradient = computed.gradient
                assert computed.is_usable
            assert np.count_nonzero(gradient) == BATCH
            accrued += gradient
        assert by_others == [1, 3, 5]
        assert sorted(accrued.tolist()) == [0.0] * 12 + [1.0] * 12
        if loader.clients is not None:
            own = loader.clients.rows(0, shard, 0, BATCH * BATCHES)
            assert accrued[own].all(), "another client's samples"
        np.testing.assert_allclose(replica.parameters, before - LR * accrued, rtol=1e-6)
        os.kill(ranks._ranks[0].process.pid, signal.SIGKILL)
        assert ahead.take(Compute(0, 12, 16, 0, LR), 0, 2, np.zeros(0)) is None
        with pytest.raises(RanksEnded):
            ahead.take(Compute(0, 12, 16, 1, LR), 1, 2, np.zeros(0))
        assert events[0].exit_code == 5
    finally:
        ranks.end()


FILES = """

class Files(torch.utils.data.TensorDataset):
    pass


def dataset():
    import os, random
    data = Files(torch.arange(24).reshape(24, 1))
    data.files = [f"/data/{n}.jpg" for n in range(24)]
    random.Random(os.getpid()).shuffle(data.files)  # As os.listdir, somewhere.
    return data
"""


@pytest.mark.long
def test_a_process_whose_files_come_in_another_order_ends_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    events: list[Any] = []
    ranks = Ranks(
        2, events.append, events.append, argv=(str(tmp_path), "worker-0", "1"),
        ready_s=COMES_S, silent_s=COMES_S,
    )  # fmt: skip
    try:
        made = job(tmp_path, more=FILES)
        ranks.start(slot=0, term=1)
        stepper, loader, *_ = build(made, 0, 0)
        with pytest.raises(RanksEnded):
            BatchesAhead(ranks, stepper.replica, loader.identity)
        assert events[0].error.startswith("rank 1: ")
    finally:
        ranks.end()
