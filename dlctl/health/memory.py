"""How much memory the processes of a job take on each host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dlctl import registry
from dlctl.health import needs
from dlctl.health.needs import Model
from dlctl.health.resources import WORKER_BYTES
from dlctl.job.config import JobFile

VALUE_BYTES = 4
STATELESS = {"none", "sgd"}
"""Optimisers of the replicas that keep nothing, unless they have a momentum; the others keep at
most two values for each parameter, as Adam does."""


class HostMemory(NamedTuple):
    needed_bytes: int
    """At most, without the activations of the model."""
    available_bytes: int | None
    """None: unknown."""

    @property
    def is_enough(self) -> bool:
        return self.available_bytes is None or self.needed_bytes <= self.available_bytes


def of_job(
    job: JobFile, model: Model | None, available: Mapping[str, int]
) -> dict[str, HostMemory]:
    """Host -> its memory. model: None: only what processes take without one. available: host ->
    bytes.
    """
    each = WORKER_BYTES + (0 if model is None else _replica_bytes(job, model))
    return {
        need.name: HostMemory(need.workers * each + need.shm_bytes, available.get(need.name))
        for need in needs.of(job, model).values()
    }


def _replica_bytes(job: JobFile, model: Model) -> int:
    """Of a worker: the parameters, their gradient, its optimiser, and what the method keeps."""
    own = job.inner
    is_plain = own.name in STATELESS and not own.options.get("momentum")
    vectors = 2 + (0 if is_plain else 2)
    method = registry.load("algorithms", job.algorithm.name)
    kept: int = method.bytes_kept(job, model.layout)
    return vectors * VALUE_BYTES * model.parameters + kept
