"""How every compressor performs on a push of a job, measured on a real gradient."""

from __future__ import annotations

import json
import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dlctl import jobfile, registry
from dlctl.errors import UsageError
from dlctl.job.config import JobFile, to_dict
from dlctl.launch.base import same_hashes
from dlctl.model import parts
from dlctl.model.cut import Bounds
from dlctl.ops import other_process, remains
from dlctl.runs import lineage, select
from dlctl.util import notes

if TYPE_CHECKING:
    from dlctl.wire.messages import Array

PUSHES = 3
"""Pushes of the same gradient in sequence, with error feedback; the last one is measured."""


def measured(run_or_file: str) -> dict[str, dict[str, Any]]:
    """Name of a compressor -> its measurements.

    For a job file, at the initial values; for a run, at its newest good checkpoint, if any.
    """
    path = Path(run_or_file)
    if path.exists() and not path.is_dir():
        job, checkpoint = jobfile.load(path), None
    else:
        directory = select.directory(run_or_file)
        job = remains.read_jobfile(directory)
        checkpoint = lineage.newest_good(directory, notes.warn)
    gradient, shards = _gradient(job, checkpoint[0] if checkpoint else None)
    return {name: _measure(name, job, gradient, shards) for name in registry.names("compressors")}


def _gradient(job: JobFile, checkpoint: Path | None) -> tuple[Array, Bounds]:
    """float32[d], and the servers' shards. A separate process computes both: it needs torch, and
    runs the user's code. Raises UsageError for a job without a task.
    """
    if job.has_loop:
        raise UsageError(
            "only the loop of a script computes its gradients: there is none to measure",
            where=job.job.file,
            hint="measure with a job that has a task with a similar model",
        )
    if parts.of_job(job).is_divided:
        raise UsageError(
            "the model is divided among parties, which push every entry: nothing to compress",
            where=job.job.file,
            hint="measure with a job that has the whole model",
        )
    with tempfile.TemporaryDirectory(prefix="dlctl-gradient-") as directory:
        file = Path(directory) / "gradient.npz"
        arguments = [str(file)] + ([str(checkpoint)] if checkpoint else [])
        other_process.run(
            "daemons.worker.sample_gradient", arguments, Path(job.job.task),
            "the gradient could not be computed",
            input=json.dumps(to_dict(job)), env={**os.environ, **same_hashes(job.job.seed)},
        )  # fmt: skip
        with np.load(file, allow_pickle=False) as found:
            return found["gradient"], tuple(found["shards"].tolist())


def _measure(name: str, job: JobFile, gradient: Array, shards: Bounds) -> dict[str, Any]:
    kind, used = registry.load("compressors", name), name == job.compression.name
    own, shared = job.compression.options, {}
    if "density" in own and "density" in kind.Options.__dataclass_fields__:
        shared = {"density": own["density"]}  # The others are measured at the same density.
    options = kind.Options(**own if used else shared)
    compressor = kind(options)
    u = np.zeros_like(gradient)
    bounds = list(pairwise(shards))
    for _ in range(PUSHES):
        u += gradient
        missing, length = u.copy(), float(np.linalg.norm(u))
        started = time.thread_time()
        packed = [compressor.take(u[lo:hi], shard) for shard, (lo, hi) in enumerate(bounds)]
        took_s = time.thread_time() - started
    for part, (lo, hi) in zip(packed, bounds, strict=True):
        missing[lo:hi] -= kind.expand(part, hi - lo).dense(hi - lo)
    push_bytes = sum(part.nbytes for part in packed)
    return {
        "used": used,
        "elements": int(u.size),
        "slices": len(bounds),
        "whole_slices": sum(hi - lo < getattr(options, "dense_below", 0) for lo, hi in bounds),
        "push_bytes": push_bytes,
        "ratio": 4 * u.size / push_bytes if push_bytes else None,
        "relative_error": float(np.linalg.norm(missing)) / length if length else 0.0,
        "take_s": took_s,
    }
