"""Conflicts with a replica that is split over several processes, `[replica]`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dlctl.job.config import PARTS_MAX, JobFile
from dlctl.jobfile.positions import KeyPath

WHOLE = ("muon", "adafactor", "sparseadam")
"""Inner optimisers that need a parameter as a whole."""


def faults(job: JobFile, method: Any) -> Iterator[tuple[KeyPath, str, str]]:
    """(where, what, what to do) of each fault."""
    chosen, name = job.replica, job.algorithm.name
    ways = [way for way in ("fsdp", "tensor", "pipeline", "hogwild") if getattr(chosen, way) > 1]
    if not ways:
        return
    way = ways[0]
    where = ("replica", way)
    if any(table.of_rows for table in method.shape.tables):
        yield where, f"{name} brings the rows of a batch to one process", "remove it"
    if ways == ["hogwild"]:  # It has its own checks: `_replica_faults`.
        return
    if len(ways) > 1:
        yield where, f"a replica is cut in one way, not by {' and '.join(ways)}", "use one of them"
    if job.workers.processes > 1:
        what = "the replica has its processes already"
        yield ("workers", "processes"), what, "remove it"
    if not method.shape.needs_servers:
        what = f"{name} has no servers: its replicas exchange what one process has"
        yield where, what, "use a method with servers, such as downpour or diloco"
    if method.shape.engine:
        yield where, f"{name} has its own engine, which needs the whole model", "remove it"
    if job.workers.batch_size == "auto":
        what = f"{way} needs a number: sizes are not tried on several processes"
        yield ("workers", "batch_size"), what, "use a number"
    if job.gradient.compile:
        yield ("gradient", "compile"), f"torch.compile does not go with {way}", "remove it"
    if job.gradient.precision == "fp16":
        yield ("gradient", "precision"), f"fp16 does not go with {way}", 'use "bf16"'
    is_whole = (job.compression.name, job.compression.options.get("values")) == ("none", "float32")
    if chosen.ranks > PARTS_MAX and not is_whole:
        what = f"a push is made up of what {PARTS_MAX} processes have taken, or fewer"
        yield ("compression", "name"), what, 'use "none" with values = "float32"'
    if way != "pipeline" and (job.inner.name in WHOLE or ":" in job.inner.name):
        what = f"{job.inner.name} may need whole parameters, and with {way} a process has slices"
        yield ("inner", "name"), what, 'use "adamw", for example'
    yield from _microbatches(job)


def _microbatches(job: JobFile) -> Iterator[tuple[KeyPath, str, str]]:
    """A batch cannot be split into more parts than it has samples."""
    chosen, size = job.replica, job.workers.batch_size
    if chosen.pipeline == 1 and chosen.microbatches:
        yield ("replica", "microbatches"), "there are no stages", "remove it"
    is_given = chosen.pipeline == 1 or chosen.microbatches
    if isinstance(size, int) and is_given and chosen.pieces > size:
        what = f"a batch is cut into {chosen.pieces}, and has {size} samples"
        instead = f"use {chosen.pieces} or more"
        yield ("workers", "batch_size"), what, instead
