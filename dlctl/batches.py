"""How many samples a batch of a worker has, and a step, which is `gradient.accumulate` batches.

It depends on the host, so everybody who has to know asks here: `[[hosts]]` may have a batch size of
their own, for larger or smaller GPUs.
"""

from __future__ import annotations

from dlctl import placement
from dlctl.config import JobFile


def size(job: JobFile, agent: str) -> int:
    """Samples of a batch of a worker that this agent starts."""
    return placement.agents(job.places)[agent].batch_size or job.workers.batch_size


def step_samples(job: JobFile, agent: str) -> int:
    """The most samples of one of its steps."""
    return size(job, agent) * job.gradient.accumulate


def largest(job: JobFile) -> int:
    """The most samples of one step, on any host; a worker may be moved to another one."""
    return max(step_samples(job, agent) for agent in placement.takes_workers(job))


def smallest(job: JobFile) -> int:
    """The same, where it is least."""
    return min(step_samples(job, agent) for agent in placement.takes_workers(job))


def mean(job: JobFile) -> float:
    """The mean over the workers as they are placed: where steps are said and samples are meant."""
    if not any(host.batch_size for host in job.places):
        return job.workers.batch_size * job.gradient.accumulate
    placed = placement.place(job)
    of = [step_samples(job, placed[f"worker-{slot}"]) for slot in range(job.workers.count)]
    return sum(of) / len(of)
