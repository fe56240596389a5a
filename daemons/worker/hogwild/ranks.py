"""A replica of several processes that step in one model without locks (`[replica] hogwild`).

The method sees one replica, and requests one batch after the other from rank 0. While rank 0
computes a batch, each later rank computes one of the following batches of the same portion, and
steps along its gradient in the memory that all ranks share. The gradient is stored there until the
method requests that batch. So what the method accrues includes the steps of all ranks.

The memory is an anonymous file (memfd) that the ranks inherit: it is freed when they exit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from daemons.worker.building import build
from daemons.worker.hogwild.memory import ModelMemory, check_device, reserve
from daemons.worker.ranks.rank_group import RankMessage
from daemons.worker.ranks.rank_processes import Ranks
from daemons.worker.replica import TorchReplica
from dlctl.errors import DlctlError
from dlctl.job.config import JobFile
from dlctl.roles.protocol.effects import Compute, Computed, FailedSample
from dlctl.wire.messages import Array


class BatchesAhead:
    """The batches that later ranks compute ahead, as rank 0 requests and collects them."""

    def __init__(self, ranks: Ranks, replica: TorchReplica, data: list[Any]) -> None:
        """Returns when all ranks share the model. data: `identity` of the loader of rank 0. Raises
        RanksEnded, DlctlError.
        """
        self._ranks = ranks
        check_device(replica)
        reserve(ranks.memory, replica.layout.size(), ranks.count)
        self._memory = ModelMemory(ranks.memory, replica, ranks.count)
        self._memory.fill(replica)
        self._memory.take(replica)
        ranks.share(data)
        self._begun: dict[int, int] = {}
        """Batch -> the rank that computes it."""
        self._portion: tuple[int, ...] = ()

    def take(self, effect: Compute, number: int, batches: int, averaged: Array) -> Computed | None:
        """The result of a batch that a later rank computes. None: rank 0 has to compute it, and the
        later ranks have started the batches after it. batches: of the portion. Raises RanksEnded.
        """
        portion = (effect.data_epoch, effect.start, effect.stop, effect.shard)
        if portion == self._portion and number in self._begun:
            return self._ended(self._begun.pop(number), number, averaged)
        for rank in self._begun.values():
            self._ranks.result_of(rank)  # Discard it: it was not requested.
        self._begun, self._portion = {}, portion
        for rank, following in zip(
            range(1, self._ranks.count), range(number + 1, batches), strict=False
        ):
            self._ranks.ask(
                rank, "batch", portion=portion, number=following, own_lr=effect.own_lr,
                norm_max=effect.norm_max, step_samples=effect.step_samples,
            )  # fmt: skip
            self._begun[following] = rank
        return None

    def _ended(self, rank: int, number: int, averaged: Array) -> Computed:
        of = self._ranks.result_of(rank)
        return Computed(
            of["loss"], self._memory.gradient(rank), averaged, of["norm"], of["is_usable"],
            is_skipped=of["is_skipped"], metrics=(of["metrics"],) if of["metrics"] else (),
            failed=tuple(FailedSample(number, *bad) for bad in of["failed"]),
        )  # fmt: skip


class Later:
    """A rank other than 0: it computes the batches that rank 0 asks for."""

    def __init__(self, job: JobFile, begin: Mapping[str, Any], rank: int, run: Path | None) -> None:
        """begin: the header of rank 0's first message. Raises as `build`, and DlctlError for a
        stream.
        """
        built = build(job, begin["slot"], 0, run)
        if built.loader.shards:
            raise DlctlError(
                "only one process can read a stream, in its order",
                hint="use a dataset with a length, or remove hogwild from [replica]",
            )
        self._stepper, self._loader = built.stepper, built.loader
        self._begin, self._rank = begin, rank
        self._accumulate = job.gradient.accumulate
        built.stepper.replica.reseed(begin["slot"], begin["term"], rank)

    def share(self, data: list[Any]) -> None:
        """Move to the shared memory, into which rank 0 has put its model. data: `identity` of the
        loader of rank 0. Raises DlctlError if this rank has other data.
        """
        if self._loader.identity != data:
            raise DlctlError(
                "the samples are others, or come in another order, than in rank 0",
                hint="dataset(), sampler() and sample_weights() must return the same in every "
                "process: sort what os.listdir or glob returns",
            )
        replica = self._stepper.replica
        memory = ModelMemory(self._begin["memory"], replica, self._begin["ranks"])
        memory.take(replica)
        self._gradient = memory.gradient(self._rank)

    def make(self, call: RankMessage) -> tuple[dict[str, Any], Sequence[Array]]:
        """Step along one batch; returns the result. The gradient is in the shared memory."""
        of = call.header
        if of["step_samples"]:
            self._loader.resize(of["step_samples"] // self._accumulate)
        data_epoch, start, stop, shard = of["portion"]
        loaded = self._loader.step(data_epoch, start, stop, of["number"], shard)
        found: dict[str, Any] = {
            "loss": float("nan"), "norm": float("nan"), "is_usable": False, "is_skipped": True,
            "metrics": {}, "failed": loaded.bad,
        }  # fmt: skip
        if not loaded.batches:
            return {"result": found}, ()
        step = self._stepper.step(
            loaded.batches, own_lr=of["own_lr"], norm_max=of["norm_max"], epoch=data_epoch
        )
        if step.gradient is not None:
            np.copyto(self._gradient, step.gradient)
        found |= {
            "loss": step.loss, "norm": step.norm, "is_usable": step.is_usable,
            "is_skipped": step.is_skipped, "metrics": dict(step.metrics),
        }  # fmt: skip
        return {"result": found}, ()
