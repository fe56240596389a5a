"""What the servers' optimiser of a job needs: shards cut for it (`dlctl/model/cut.py`), memory."""

from __future__ import annotations

from collections.abc import Sequence

from dlctl import registry
from dlctl.job import shard_weights
from dlctl.job.config import JobFile
from dlctl.model import parts
from dlctl.model.cut import Bounds, cut, units
from dlctl.model.flat import Layout, TensorEntry
from dlctl.optim.base import Optimizer
from dlctl.optim.matrices import MatrixOptimizer

FLOAT_BYTES = 4


def of_job(job: JobFile, layout: Layout, weights: Sequence[float] = ()) -> Bounds:
    """The bounds of the shards; (0,) without servers. Raises UsageError for too many servers.

    weights: of the shards; (): as the job says.
    """
    if not job.servers.count:
        return (0,)
    if (division := parts.of_job(job)).is_divided:
        return division.bounds(layout)
    weights = weights or job.servers.weights or shard_weights.of_job(job, layout.size())
    optimizer = _of_matrices(job)

    def is_whole(entry: TensorEntry) -> bool:
        return optimizer is not None and optimizer.is_whole(entry)

    return cut(units(layout, is_whole), weights)


def matrix_bytes(job: JobFile, layout: Layout, lo: int, hi: int) -> int:
    """Bytes of all that the optimiser keeps beside the matrices of a shard."""
    if (optimizer := _of_matrices(job)) is None:
        return 0
    optimizer.place(layout, lo, hi)
    return FLOAT_BYTES * sum(cut.hi - cut.lo for cut in (optimizer.kept or {}).values())


def remarks(job: JobFile, layout: Layout) -> list[str]:
    """What a user should know about the optimiser of this model's matrices, a sentence each."""
    if (optimizer := _of_matrices(job)) is None or not job.servers.count:
        return []
    optimizer.place(layout, 0, layout.size())
    return optimizer.remarks()


def made(job: JobFile) -> Optimizer:
    """The servers' optimiser, which is on no shard."""
    kind = registry.load("optimizers", job.optimizer.name)
    found: Optimizer = kind(kind.Options(**job.optimizer.options))
    return found


def _of_matrices(job: JobFile) -> MatrixOptimizer | None:
    optimizer = made(job)
    return optimizer if isinstance(optimizer, MatrixOptimizer) else None
