"""Replicas cut over real processes compute what one process does; this process is rank 0.

On a machine with a GPU for each rank they also do so on GPUs, with NCCL.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from daemons.worker.building import Built, build
from daemons.worker.ranks.rank_processes import Ranks, RanksEnded
from daemons.worker.task.user_task import TaskError
from dlctl.compress.base import take
from dlctl.compress.plain import expand
from dlctl.compress.topk import TopK
from dlctl.job import config
from dlctl.model.vector import to_host

pytestmark = pytest.mark.usefixtures("forked")

RANKS_MAX = 3
DEVICES = ["cpu", "cuda"] if torch.cuda.device_count() >= RANKS_MAX else ["cpu"]
TASK = """
    import sys
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional
    from torch.utils.data import TensorDataset

    IS_LATER = "daemons.worker.later_rank" in " ".join(sys.orig_argv)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(6)
            self.hidden, self.out = nn.Linear(6, 8), nn.Linear(8, 6)
            self.hidden.bias.requires_grad_(False)

        def forward(self, x):
            return x + self.out(functional.gelu(self.hidden(self.norm(x))))

    class Net(nn.Module):
        '''A tied matrix, a way past the blocks, a parameter of one row and a buffer.'''

        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(2048, 6)
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.scale = nn.Parameter(torch.ones(1))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += 1
            h = first = self.words(x).mean(1)
            for block in self.blocks:
                h = block(h)
            return (h + self.scale * first) @ self.words.weight.T

    def model():
        return Net()

    def dataset():
        rng = torch.Generator().manual_seed(5)
        x, y = (torch.randint(0, 11, size, generator=rng) for size in ((60, 5), (60,)))
        return TensorDataset(x, y)

    def loss(model, batch):
        x, y = batch
        scores = model(x)
        right = (scores.argmax(1) == y).float().mean()
        return functional.cross_entropy(scores, y), {"right": right}

    def evaluate(model):
        x, y = dataset().tensors
        return {"loss": functional.cross_entropy(model(x), y)}
    """
PLAN = """
    def tensor_plan(model):
        return {"blocks.*.hidden": "colwise", "blocks.*.out": "rowwise"}
    """
OWN = """
    def parallelize(model, mesh):
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    """
CHECKPOINTED = """
    from torch.utils.checkpoint import checkpoint

    class Again(Net):
        def forward(self, x):
            self.seen += 1
            h = first = self.words(x).mean(1)
            for block in self.blocks:
                h = checkpoint(block, h, use_reentrant=False)
            return (h + self.scale * first) @ self.words.weight.T

    def model():
        return Again()
    """
WEIGHED = """
    def model():
        net = Net()
        net.blocks[1].eval()
        return net

    def loss(model, batch):
        assert [block.training for block in model.blocks] == [True, False, True, True]
        x, y = batch
        counts = y % 3  # Batches of unequal weight, and samples of none.
        scores = model(x)
        each = functional.cross_entropy(scores, y, reduction="none")
        right = (scores.argmax(1) == y).float()
        total = counts.sum()
        means = [(values * counts).sum() / total.clamp(min=1) for values in (each, right)]
        return means[0], {"right": means[1]}, total
    """
OPTIONS = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}
ADAMW = config.Choice(name="adamw", options=OPTIONS)
MUON = config.Choice(name="muon", options={"lr": 1e-2, "adamw": OPTIONS})
WHOLE = config.Choice(name="none")
COMES_S = 120.0


class House:
    """Rank 0, and what it was told."""

    def __init__(
        self, path: Path, more: str, device: str, inner: config.Choice, compression: config.Choice,
        replica: dict[str, Any],
    ) -> None:  # fmt: skip
        (path / "train.py").write_text(dedent(TASK) + dedent(more))
        self.job = config.JobFile(
            job=config.Job(name="cut", task=str(path / "train.py:")),
            inner=inner,
            gradient=config.Gradients(clip_norm=0.5),
            compression=compression,
            workers=config.Workers(batch_size=8, device=device, threads=2),
            replica=config.ReplicaProcesses(**replica),
        )
        (path / "job.json").write_text(json.dumps(config.to_dict(self.job)))
        self.events: list[Any] = []
        self._is_told = threading.Event()
        self.ranks = Ranks(
            self.job.ranks, self._tell, self._tell, argv=(str(path), "worker-0", "1"),
            ready_s=COMES_S, silent_s=COMES_S,
        )  # fmt: skip

    def build(self) -> Built:
        self.ranks.start(slot=0, term=1)
        return build(self.job, 0, 0, ranks=self.ranks)

    def until_told(self) -> Any:
        assert self._is_told.wait(COMES_S)
        return self.events[0]

    def _tell(self, event: Any) -> None:
        self.events.append(event)
        self._is_told.set()

    def pids(self) -> list[int]:
        return [each.process.pid for each in self.ranks._ranks]


@pytest.fixture(params=DEVICES)
def house(
    tmp_path: Path, monkeypatch, request: pytest.FixtureRequest
) -> Iterator[Callable[..., House]]:
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[House] = []

    def make(
        more: str = "", inner: config.Choice = ADAMW, compression: config.Choice = WHOLE,
        **replica: Any,
    ) -> House:  # fmt: skip
        made.append(House(tmp_path, more, request.param, inner, compression, replica))
        return made[-1]

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # Groups of stages look for their store when they go: it has to be there.
    for each in made:
        each.ranks.end()
        assert not any(map(psutil.pid_exists, each.pids()))


def agrees(at: House, accumulate: int = 1) -> None:
    """With one process: losses, gradients, own steps, what is saved and what goes on from that."""
    one, cut = (
        build(dataclasses.replace(at.job, replica=config.ReplicaProcesses()), 0, 0),
        at.build(),
    )
    both = [one, cut]

    def step(number: int, **how: Any) -> None:
        a, b = (
            each.stepper.step(each.loader.step(0, 0, 60, number).batches, norm_max=1e9, **how)
            for each in both
        )
        assert b.loss == pytest.approx(a.loss, rel=1e-5)
        assert b.norm == pytest.approx(a.norm, rel=1e-5)
        assert b.metrics == pytest.approx(a.metrics)
        if how.get("gather", True):
            np.testing.assert_allclose(b.gradient, to_host(a.gradient), rtol=1e-5, atol=1e-7)
        near(a=one.stepper.replica.parameters, b=cut.stepper.replica.parameters)

    def near(a: Any, b: Any) -> None:
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=2e-6)

    step(0)
    step(1, own_lr=1e-2, gather=False)
    step(2, own_lr=1e-2, gather=True)
    states = [each.stepper.state() for each in both]
    assert states[0].keys() == states[1].keys()
    for name, array in states[0].items():
        near(a=array, b=states[1][name])
        assert (array.dtype, array.shape) == (states[1][name].dtype, states[1][name].shape)
    kept = [{name: np.array(array) for name, array in state.items()} for state in states]
    values = np.array(one.stepper.replica.parameters)
    step(3, own_lr=1e-2, gather=False)
    for each, state in zip(both, reversed(kept), strict=True):  # Each goes on from the other's.
        each.stepper.restore(state)
        each.stepper.replica.parameters[:] = values
    step(3, own_lr=1e-2, gather=False)
    buffers = one.stepper.replica.averaged()
    cut.stepper.replica.load_averaged(buffers)
    found = [each.stepper.replica.evaluate(values.copy(), buffers)["loss"] for each in both]
    assert found[0] == found[1]
    step(4)
    memory_comes_back(at, cut)
    assert not at.events


def memory_comes_back(at: House, cut: Built) -> None:
    """That of a gradient, as soon as nobody has any of it."""

    def taken() -> int:
        return os.fstat(at.ranks.memory).st_blocks

    gradient = cut.stepper.step(cut.loader.step(0, 0, 60, 5).batches, norm_max=1e9).gradient
    part, before = gradient[2:4], taken()
    del gradient
    assert taken() == before
    del part
    assert taken() < before


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("more", ["", WEIGHED], ids=["means", "weighed"])
def test_two_processes_with_fsdp_come_to_what_one_does(house, more) -> None:
    agrees(house(more, fsdp=2))


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("more", "replica"),
    [
        ("", {"fsdp": 3}),
        (OWN, {"fsdp": 2}),
        (PLAN, {"tensor": 2}),
        ("", {"pipeline": 2}),
        (CHECKPOINTED, {"pipeline": 2}),
        (WEIGHED, {"fsdp": 3}),
        (WEIGHED + PLAN, {"tensor": 2}),
        (WEIGHED, {"pipeline": 2, "microbatches": 3}),
        ("", {"pipeline": 2, "inner": MUON}),
        ("", {"pipeline": 3, "schedule": "gpipe", "microbatches": 4}),
        ("def stages(model):\n    return [['blocks.0'], ['blocks.1', 'blocks.2', 'blocks.3']]",
         {"pipeline": 2, "microbatches": 3}),
    ],
    ids=str,
)  # fmt: skip
def test_every_way_to_cut_a_replica_comes_to_what_one_process_does(house, more, replica) -> None:
    agrees(house(more, **replica))


@pytest.mark.parametrize("feedback", [False, True])
def test_each_process_keeps_what_it_does_not_send_only_with_feedback(house, feedback) -> None:
    options = {"density": 0.1, "dense_below": 0, "feedback": feedback, "values": "float32"}
    at = house(fsdp=2, compression=config.Choice(name="topk", options=options))
    cut, topk = at.build(), TopK(TopK.Options(**options))
    residual: Any = None
    for number in range(2):
        batches = cut.loader.step(0, 0, 60, number).batches
        gradient = cut.stepper.step(batches, norm_max=1e9).gradient
        if residual is not None:
            gradient += residual
        added = np.array(gradient)
        packed = take(topk, gradient, 0)
        parts = packed.arrays[0][::2].tolist()
        assert len(parts) == 2
        sent = expand(TopK, packed, added.size).dense(added.size)
        for part, lo in zip(parts, [0, parts[0]], strict=True):
            here, found = added[lo : lo + part], sent[lo : lo + part]
            k = int(0.1 * part)
            assert 0 < np.count_nonzero(found) <= k
            least = np.sort(np.abs(here))[-k]
            np.testing.assert_array_equal(found, np.where(np.abs(here) >= least, here, 0))
        left = added - sent if feedback else np.zeros_like(added)
        np.testing.assert_array_equal(np.asarray(gradient), left)
        assert left.any() == feedback
        residual = gradient
    assert not at.events


@pytest.mark.long
def test_a_rank_that_dies_in_a_step_ends_the_replica(house) -> None:
    at = house(fsdp=2)
    cut = at.build()
    (pid,) = at.pids()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RanksEnded):
        cut.stepper.step(cut.loader.step(0, 0, 60, 0).batches, norm_max=1e9)
    assert f"(pid {pid})" in at.events[0].message
    assert "SIGKILL" in at.events[0].message
    assert at.events[0].exit_code == 5


@pytest.mark.long
def test_a_rank_without_memory_is_one_error_that_says_what_to_try(house) -> None:
    at = house("""
        def loss(model, batch):
            if IS_LATER:
                torch.empty(1 << 60, dtype=torch.uint8)
            return model(batch[0]).mean()
        """, fsdp=2)  # fmt: skip
    cut = at.build()
    ended: list[BaseException] = []

    def step() -> None:
        with pytest.raises(RanksEnded) as caught:
            cut.stepper.step(cut.loader.step(0, 0, 60, 0).batches, norm_max=1e9)
        ended.append(caught.value)

    thread = threading.Thread(target=step)
    thread.start()
    failed = at.until_told()
    at.ranks.end()  # As the worker does then.
    thread.join(COMES_S)
    assert ended
    assert at.events == [failed]
    assert failed.error.startswith("rank 1: task.loss ")
    assert "8 samples (workers.batch_size)" in failed.error


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "replica", "message"),
    [
        ("", {"tensor": 2}, "the job file has replica.tensor, but the task has no tensor_plan"),
        ("def tensor_plan(model):\n    return {'layers.*': 'colwise'}", {"tensor": 2},
         'task.tensor_plan has "layers.*", but the model has no such module'),
        ("def model():\n    return nn.Linear(6, 11)", {"pipeline": 2},
         "the model has no sequence of modules that could be cut into 2 stages"),
        ("def model():\n    net = Net()\n    net.scale.register_hook(abs)\n    return net",
         {"fsdp": 2},
         'parameter "scale" has a hook on its gradient, and [replica] cuts that gradient'),
        ("def parallelize(model, mesh):\n    pass", {"fsdp": 2},
         "task.parallelize has cut no parameter of the model"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_the_task_s_error(house, more, replica, message) -> None:
    at = house(more, **replica)
    with pytest.raises((TaskError, RanksEnded)) as caught:
        at.build()
    # All ranks find it; the one that says it first is heard.
    error = at.until_told().error if caught.type is RanksEnded else caught.value.message
    assert message in error
