"""Which supply of data a run has, by its dataset and its method."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import partial

from dlctl import registry
from dlctl.errors import DlctlError
from dlctl.job import batches, schedule
from dlctl.job.clients import epoch_samples
from dlctl.job.config import JobFile
from dlctl.roles.coordinator.pools.counting import CountingPool
from dlctl.roles.coordinator.pools.data_pool import DataPool
from dlctl.roles.coordinator.pools.portions import ClientPool, PortionPool
from dlctl.roles.coordinator.pools.streams import StreamPool
from dlctl.roles.coordinator.training.dataset import Dataset
from dlctl.roles.coordinator.training.lead import MethodLead


def build(job: JobFile, dataset: Dataset, lead: MethodLead) -> DataPool:
    """All of its portions, none of them done. Raises DlctlError if this job cannot be trained with
    the dataset.
    """
    samples, shards, clients = dataset[:3]
    if dataset.is_own:
        _check_own(job)
    elif samples < 1 and not shards:
        raise DlctlError("the dataset has no samples", hint="check the task's dataset()")
    if shards:
        _check_stream(job, lead)
    if clients and lead.driven is not None:
        raise DlctlError(
            f'"{job.algorithm.name}" has one dataset, and data.clients cuts it into many',
            hint="remove data.clients, or take another [algorithm]",
        )
    try:
        schedule.factor(job, samples)
    except ValueError as error:
        raise DlctlError(str(error), hint="correct [schedule]: warmup, or over") from None
    if shards:
        return _stream(job, dataset)
    if dataset.is_own:
        pool: PortionPool = CountingPool(_portion_samples(job))
        lead.follow(pool)
        return pool
    pool = _clients(job, clients, lead) if clients else _portions(job, samples, lead)
    lead.follow(pool)
    return pool


def _check_stream(job: JobFile, lead: MethodLead) -> None:
    """Raises DlctlError if the job needs a dataset of known length."""
    if lead.driven is not None or lead.cuts_epochs:
        raise DlctlError(
            f'"{job.algorithm.name}" goes over the whole dataset again and again, and '
            "this one is a stream, of unknown length",
            hint="give a dataset with __len__ and __getitem__, or take another [algorithm]",
        )
    if epochs := job.job.stop.epochs:
        raise DlctlError(
            "an iterable dataset is a stream, whatever its __len__ says, so job.stop cannot "
            f"count epochs (epochs = {epochs:g}, also where the job file says nothing)",
            hint="write stop = { samples = 1_000_000 } under [job], or steps, seconds, target; "
            "or return a map-style dataset, with __len__ and __getitem__",
        )
    if batches.smallest(job) != batches.largest(job):
        raise DlctlError(
            "the dataset is a stream, whose steps are counted by batches of one size",
            hint="remove batch_size from [[hosts]]",
        )


def _check_own(job: JobFile) -> None:
    """Raises DlctlError if the job needs to know the data."""
    if epochs := job.job.stop.epochs:
        raise DlctlError(
            "the script has data of its own, so job.stop cannot count epochs "
            f"(epochs = {epochs:g}, also where the job file says nothing)",
            hint="write stop = { samples = 1_000_000 } under [job], or steps, seconds, target; "
            "or let run.loader(dataset, batch_size) hand out the samples",
        )


def _portion_samples(job: JobFile) -> int:
    return job.data.portion_batches * batches.largest(job)


def _stream(job: JobFile, dataset: Dataset) -> StreamPool:
    stop = job.job.stop
    return StreamPool(
        dataset.shards, _portion_samples(job), batches.largest(job),
        stop.samples or math.inf, stop.steps or math.inf, order=dataset.order,
    )  # fmt: skip


def _clients(job: JobFile, clients: tuple[int, ...], lead: MethodLead) -> ClientPool:
    """Steps and samples are counted when they are done: their limits are none of the pool's."""
    drawn = lead.side.cohort(len(clients))
    with_data = job.workers.count - len(lead.without_data)
    owners = with_data if job.data.partition == "workers" else 0
    pool = ClientPool(
        epoch_samples(clients, drawn), drawn.clients, sizes=clients, passes=drawn.passes,
        seed=job.job.seed, owners=owners,
    )  # fmt: skip
    pool.limit = _epochs_limit(job, pool)
    return pool


def _portions(job: JobFile, samples: int, lead: MethodLead) -> PortionPool:
    """The pool of a dataset of known length. Raises DlctlError if the run is too short for its
    method to have an effect.
    """
    portion_samples = _portion_samples(job)
    if lead.driven is not None:
        pool: PortionPool = lead.driven.supply(samples, portion_samples)
    else:
        pool = PortionPool(samples, portion_samples)
    pool.limit = _limit(job, pool)
    steps = _in_all(pool, partial(pool.steps_before, batch_size=batches.smallest(job)))
    trained = _in_all(pool, pool.samples_before)
    method = registry.load("algorithms", job.algorithm.name)
    faults = (*method.check_steps(job, steps), *method.check_samples(job, trained))
    for path, what, instead in faults:
        raise DlctlError(f"{'.'.join(path)}: {what}", hint=instead)
    return pool


def _in_all(pool: PortionPool, before: Callable[[int], int]) -> float:
    """`before`, summed over all portions that are leased."""
    if math.isinf(pool.limit):
        return math.inf
    epochs, rest = divmod(int(pool.limit), pool.per_epoch)
    return epochs * before(pool.per_epoch) + before(rest)


def _limit(job: JobFile, pool: PortionPool) -> float:
    """Portions until the first of the job's limits; steps and samples round up to portions. If
    hosts have their own batch sizes, the limit of steps may be reached earlier; those of training
    loops of the user's own are counted when they are done.
    """
    stop = job.job.stop
    steps_before = partial(pool.steps_before, batch_size=batches.largest(job))
    steps = None if job.has_loop else stop.steps  # Its steps may be of any size.
    return min(
        _epochs_limit(job, pool),
        _until(steps, pool.per_epoch, steps_before),
        _until(stop.samples, pool.per_epoch, pool.samples_before),
    )


def _epochs_limit(job: JobFile, pool: PortionPool) -> float:
    epochs = job.job.stop.epochs
    return math.ceil(epochs * pool.per_epoch) if epochs else math.inf


def _until(wanted: int | None, per_epoch: int, before: Callable[[int], int]) -> float:
    """Portions until `before`, summed over epochs, reaches `wanted`."""
    if not wanted:
        return math.inf
    epochs, rest = divmod(wanted, before(per_epoch))
    return epochs * per_epoch + bisect_left(range(per_epoch), rest, hi=per_epoch, key=before)
