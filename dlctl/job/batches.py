"""The number of samples of a worker's batch, and of a step, which is `gradient.accumulate` batches.

It depends on the host, so all callers use this module: `[[hosts]]` may have their own batch size,
for larger or smaller GPUs. With "auto" it is open until a worker has found it; then the coordinator
uses the `resolved` job, and sends the size to the workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from dlctl.job import placement
from dlctl.job.config import JobFile

AUTO = "auto"
FOUND_MAX = 2**20
"""No worker finds more."""
LOOP_STEP_MAX = 2**40
"""Samples that a training loop of the user's own may say that a step has."""
Fault = tuple[tuple[str, ...], str, str]


def is_open(job: JobFile) -> bool:
    """Whether a worker has to find it."""
    return job.workers.batch_size == AUTO


def resolved(job: JobFile, found: int) -> JobFile:
    """The job with the size that a worker has found, if it was open."""
    if not is_open(job) or not 0 < found <= FOUND_MAX:
        return job
    return replace(job, workers=replace(job.workers, batch_size=found))


def size(job: JobFile, agent: str) -> int:
    """Samples of a batch of a worker that this agent starts. The size must not be open."""
    host = placement.agents(job.places).get(agent)  # None: that of a guest.
    found = (host.batch_size if host else None) or job.workers.batch_size
    assert isinstance(found, int), "the batch size is not found yet"
    return found


def step_samples(job: JobFile, agent: str) -> int:
    """The most samples of one of its steps."""
    return size(job, agent) * job.gradient.accumulate


def largest(job: JobFile) -> int:
    """The most samples of one step, on any host; a worker may be moved to another one."""
    return max(step_samples(job, agent) for agent in placement.takes_workers(job))


def bound(job: JobFile) -> int:
    """The same, also while the size is open, or chosen by a training loop of the user's own."""
    if job.has_loop:
        return LOOP_STEP_MAX
    return FOUND_MAX * job.gradient.accumulate if is_open(job) else largest(job)


def cut(job: JobFile) -> str:
    """How the samples of an epoch are cut into batches: where this is the same, so are the samples
    of each batch of each portion.
    """
    of_hosts = [host.batch_size for host in job.places if host.batch_size]
    sizes = [job.data.portion_batches, job.workers.batch_size, *of_hosts]
    order = job.job.seed if job.data.shuffle else "-"
    return f"{'x'.join(map(str, sizes))}/{order}"


def smallest(job: JobFile) -> int:
    """The same on the host with the smallest batch size; a training loop of the user's own may make
    steps of any size.
    """
    if job.has_loop:
        return 1
    return min(step_samples(job, agent) for agent in placement.takes_workers(job))


def steps_planned(job: JobFile) -> float:
    """The most steps that all workers together make, by the job file; infinite if unknown."""
    stop = job.job.stop
    limits = [float(stop.steps or math.inf)]
    if stop.samples and not is_open(job):
        limits.append(2 * stop.samples / smallest(job))  # The batches of a portion are of one size.
    return min(limits) + job.data.portion_batches  # The last portion is completed.


def mean(job: JobFile) -> float:
    """The mean over the workers by their placement, to convert steps to samples. NaN while the size
    is open.
    """
    if is_open(job):
        return math.nan
    placed = placement.place(job)
    of = [step_samples(job, placed[f"worker-{slot}"]) for slot in range(job.workers.count)]
    return sum(of) / len(of)


def faults(job: JobFile) -> Iterator[Fault]:
    """Conflicts with an open size: key, message, suggestion."""
    if not is_open(job):
        return
    if any(host.batch_size for host in job.places):
        what = "it is for all hosts, and some have their own batch_size"
        yield ("workers", "batch_size"), what, "write a number"
    for key in ("warmup", "over"):
        if "step" in getattr(job.schedule, key) and not getattr(job.schedule, key).startswith("0 "):
            what = 'with batch_size = "auto" the number of samples of these steps is unknown'
            yield ("schedule", key), what, 'as in "10_000 samples"'
