"""What servers that are gone have left in their state files, as the next ones would find it."""

from __future__ import annotations

import numpy as np

from dlctl.job.config import COUNT_MAX, Servers
from dlctl.model.flat import slice_bounds
from dlctl.runs import acks, kept_shards
from dlctl.shards.base import Spec
from dlctl.shards.mapped import Mapped

from . import ledger
from .job import BLOCK_CELLS, SERVERS, Broken, Job


def spec(job: Job, shard: int) -> Spec:
    lo, hi = slice_bounds(SERVERS * job.options.cells, SERVERS, shard)
    return Spec(job.directory.name, shard, lo, hi, {}, workers=COUNT_MAX)


def files(job: Job) -> dict[int, bytes]:
    """Shard -> its file. Raises Broken if one is missing or bad."""
    found = kept_shards.kept(job.directory, Servers(count=SERVERS))
    if len(found) != SERVERS:
        raise Broken(f"{len(found)} servers have left a state")
    for kept in found:
        if kept.problem:
            raise Broken(f"{kept.path}: {kept.problem}")
    return {kept.shard: kept.path.read_bytes() for kept in found}


def parameters(job: Job, shard: int, data: bytes) -> ledger.Array:
    """float32[cells] of a state. Raises Unusable."""
    return Mapped.reopen(bytearray(data), spec(job, shard), kept_shards.boot_id()).w.copy()


def judge(job: Job, found: dict[int, bytes]) -> ledger.Verdict:
    """The ledger's word on states: nobody has recovered anything yet."""
    weights = np.concatenate([parameters(job, shard, found[shard]) for shard in sorted(found)])
    blocks = ledger.read_blocks(job.blocks_path, BLOCK_CELLS)
    return ledger.judge(weights, SERVERS, blocks, BLOCK_CELLS, acks.read_all(job.directory))
