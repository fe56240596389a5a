"""One real gradient of a job: `python -m daemons.worker.sample_gradient OUTPUT [CHECKPOINT]`.

`dlctl compressors --job` runs this.

The job is read as JSON from standard input. The gradient is computed at the parameters of the
checkpoint in the directory CHECKPOINT, without it at the model's initial ones. The task is loaded
as in a worker, and so are the samples, those of the run's first batches. OUTPUT is a .npz file with
the bounds of the servers' shards and a float32 vector: the sum of their gradients, of which each
server gets a slice in a push; for local SGD and EASGD the sum of a replica's own steps.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np

from daemons.process import print_error
from daemons.worker import frozen_parameters
from daemons.worker.building import build
from daemons.worker.replica import TorchReplica
from daemons.worker.task.user_task import TaskError
from dlctl import registry
from dlctl.errors import DlctlError
from dlctl.job import batches, placement
from dlctl.job.config import JobFile, from_dict
from dlctl.model.flat import Layout
from dlctl.model.vector import copy_into, euclidean_norm, to_host
from dlctl.optim import bounds
from dlctl.records.manifest import FROZEN
from dlctl.runs import checkpoints
from dlctl.wire.messages import Array


def main(output: str, checkpoint: str = "") -> int:
    """Run the command; returns its exit code. An error is one line of JSON on standard error."""
    try:
        job = from_dict(JobFile, json.load(sys.stdin))
        at = Path(checkpoint) if checkpoint else None
        vector, layout = gradient(job, at)
        np.savez(output, gradient=vector, shards=np.array(bounds.of_job(job, layout), np.int64))
    except DlctlError as error:
        print_error(error)
        return error.exit_code
    return 0


def gradient(job: JobFile, checkpoint: Path | None) -> tuple[Array, Layout]:
    """float32[d], the content of one push of the job's method, from the job's first portion, and
    the layout of the model.

    Raises TaskError for what is wrong with the task, also if the gradient is not finite, and
    DlctlError if the checkpoint is of another model.
    """
    stepper, loader, *_ = build(job, slot=0, processes=0)
    if not batches.is_open(job):
        loader.resize(batches.size(job, placement.place(job)["worker-0"]))
    replica = stepper.replica
    if checkpoint is not None:
        _load(replica, checkpoint)
    method = registry.load("algorithms", job.algorithm.name)
    options = method.Options(**job.algorithm.options)
    push = method.push_kind(options)
    step_samples = loader.batch_size * job.gradient.accumulate
    of_all = push.target or push.batches * step_samples * job.workers.count
    wanted = math.ceil(of_all / job.workers.count)
    samples = min(loader.order.length or wanted, wanted)
    own_lr = job.inner.options["lr"] if push.is_displacement else None
    total = np.zeros(replica.layout.size(), np.float32)
    before = to_host(replica.parameters).copy()
    for number in range(-(-samples // step_samples)):
        loaded = loader.step(0, 0, samples, number, shard=0).batches
        if not loaded:
            continue  # All samples are bad, or the stream has ended.
        step = stepper.step(loaded, own_lr=own_lr, gather=own_lr is None)
        if step.gradient is not None:
            weight = sum(of for _, of in loaded) if push.target else 1
            total += weight * to_host(step.gradient)
        if not (step.is_usable and math.isfinite(euclidean_norm(total))):
            raise TaskError(
                f"batch {number} has the loss {step.loss:g} and a gradient that is not finite, or "
                "too large to be squared; no worker would push it",
                where=replica.task.place("loss"),
                hint="torch.autograd.set_detect_anomaly(True) shows where a NaN comes from",
            )
    if push.target:
        total /= samples
    push_of = before - to_host(replica.parameters) if push.is_displacement else total
    return push_of, replica.layout


def _load(replica: TorchReplica, checkpoint: Path) -> None:
    manifest = checkpoints.read_manifest(checkpoint)
    size = replica.layout.size()
    if manifest["size"] != size:
        raise DlctlError(
            f"the checkpoint has {manifest['size']} elements, the task's model {size}",
            where=str(checkpoint),
            hint="the task has changed since; name the job file instead of the run",
        )
    copy_into(replica.parameters, checkpoints.read_slice(checkpoint, manifest, "w", 0, size))
    replica.load_averaged(checkpoints.read_averaged(checkpoint, manifest))
    if path := checkpoints.frozen_file(checkpoint, manifest):
        frozen_parameters.load(replica, path, bytes.fromhex(manifest[FROZEN]["digests"]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
