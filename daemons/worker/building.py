"""Loads the task, model and data of a job, and the engine of its method, in every process that
computes gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from daemons.worker import batch_size_search, initial_weights, inner_optimizer
from daemons.worker.data.federated_clients import clients_of, dataset_of, round_samples
from daemons.worker.data.portion_loader import PortionLoader
from daemons.worker.data.sample_order import chosen_by
from daemons.worker.data.stream_loader import StreamLoader
from daemons.worker.mkl_first_calls import make_first_calls
from daemons.worker.ranks.rank_processes import Ranks
from daemons.worker.replica import TorchReplica, choose_device, seed_all
from daemons.worker.stepper import Stepper
from daemons.worker.task.user_task import (
    Task,
    TaskError,
    calling,
    is_stream,
    load_task,
    load_user,
)
from dlctl import registry
from dlctl.algorithms.engines import EnginePlace, Operations
from dlctl.errors import DlctlError
from dlctl.job import parties
from dlctl.job.config import JobFile, ParameterGroup
from dlctl.model import parameter_groups, parts
from dlctl.model.flat import TRAINED
from dlctl.model.parameter_groups import SHOWN_MAX
from dlctl.stores import addresses
from dlctl.util import cores

log = logging.getLogger("dlctl")


class Built(NamedTuple):
    stepper: Any
    """A Stepper, or a CutStepper."""
    loader: Any
    """A PortionLoader; None: the worker's part has no data."""
    samples: int
    """The samples of a data epoch; 0: the dataset is a stream, or there is none."""
    batch_size: int
    """The largest that fits into memory; 0: it was not measured."""


def build(
    job: JobFile,
    slot: int,
    processes: int,
    run: Path | None = None,
    *,
    finds: bool = False,
    ranks: Ranks | None = None,
) -> Built:
    """Load the task of a job; sets the number of torch's threads.

    slot: of the worker; spreads workers over GPUs. processes: number of data loader processes. run:
    directory of the run whose stored code is used (`stored_code.py`); None: the files as they are
    now. finds: measure the largest batch size. ranks: the other processes of the replica, already
    started; None: it is not cut. Raises TaskError for what is wrong with the task, DlctlError if
    there is no such device, RanksEnded.
    """
    replica = build_replica(job, slot, run=run, memory=ranks.memory if ranks is not None else -1)
    if not parts.of_job(job).of(slot).has_data:
        return Built(Stepper(replica, job.gradient), None, 0, 0)
    task = replica.task
    dataset = dataset_of(job, task)
    streams = is_stream(dataset)
    clients = clients_of(job, task, dataset)
    make_loader = partial(
        StreamLoader if streams else PortionLoader,
        dataset,
        seed=job.job.seed,
        shuffle=job.data.shuffle,
        processes=processes,
        collate=task.collate,
        place=task.place("dataset"),
        draw=chosen_by(task, dataset, job.job.seed),
        tolerant=job.data.bad_samples_max > 0,
        clients=clients,
        pieces=job.replica.pieces,
    )
    found = 0
    if finds:
        # A loader of its own, so that the trials do not change what the run's loader draws.
        with closing(make_loader(batch_size=1)) as tried:
            found = batch_size_search.batch_size(job, replica, tried)
    size = job.workers.batch_size
    loader = make_loader(
        batch_size=size if isinstance(size, int) else found or batch_size_search.FIRST,
        accumulate=job.gradient.accumulate,
    )
    for line in parameter_groups.described(job.parameters, replica.layout) if slot == 0 else ():
        log.info("%s", line)
    for line in (*task.unused(), *replica.modes.described()) if slot == 0 else ():
        log.warning("%s", line)
    stepper: Any
    if ranks is not None:
        from daemons.worker.ranks.cut_replica import CutStepper, WholeReplica

        assert isinstance(replica, WholeReplica)
        devices = [_device(job, slot, rank) for rank in range(job.replica.ranks)]
        stepper = CutStepper(job, replica, ranks, devices)
    else:
        groups = parameter_groups.of_each(job.parameters, replica.layout)
        names = [entry.name for entry, _, _ in replica.layout.slices(TRAINED)]
        optimizer = inner_optimizer.make(job.inner, replica.values, groups, names)
        stepper = Stepper(replica, job.gradient, optimizer)
    samples = loader.order.length if clients is None else round_samples(job, clients)
    return Built(stepper, loader, samples, found)


def build_replica(
    job: JobFile, slot: int, rank: int = 0, run: Path | None = None, memory: int = -1
) -> TorchReplica:
    """The model alone, the same for all slots and ranks; sets the number of torch's threads, which
    the ranks of a replica share. memory: descriptor of the file for its values. Raises as `build`.
    """
    workers = job.workers
    threads = workers.threads or cores.usable() // workers.count  # A fair share.
    torch.set_num_threads(max(1, threads // job.ranks))
    make_first_calls()
    seed_all(job.job.seed)  # A dataset drawn during the import has to be the same in all workers.
    task = _task_of(job, slot, run)
    job, division = parties.job_of(job, slot), parts.of_job(job)
    if job.job.stop.target and division.of(slot).has_data and not task.has("evaluate"):
        raise TaskError(
            f'job.stop.target is "{job.job.stop.target}", and the task has no evaluate',
            where=task.place("loss"),
            hint="add evaluate(model) -> {metric: value} to the task, or remove target",
        )
    device = _device(job, slot, rank)
    lacks = not division.is_divided and _does_without_weights(job, slot)
    kind: Any = TorchReplica
    if job.replica.ranks > 1:
        # This import takes a second.
        from daemons.worker.ranks.cut_replica import WholeReplica, give_memory_back

        give_memory_back()
        _check_devices(job, device)
        kind, device = partial(WholeReplica, memory), torch.device("cpu")

    def prepare(model: nn.Module) -> None:
        if job.job.weights and not lacks:
            path, warns = initial_weights.place(job.job.weights, run), slot == rank == 0
            initial_weights.load(model, path, strict=job.job.strict, warns=warns)
        if job.parameters:
            freeze(model, job.parameters)

    replica: TorchReplica = kind(
        task, device=str(device), seed=job.job.seed, prepare=prepare,
        precision=job.gradient.precision, compiled=job.gradient.compile,
    )  # fmt: skip
    replica.lacks_weights = lacks
    if rank == 0:
        replica.check_finite()
    if slot == rank == 0 and registry.load("algorithms", job.algorithm.name).shape.same_loss:
        warn_of_changing_losses(job.algorithm.name, replica.model)
    return replica


def _task_of(job: JobFile, slot: int, run: Path | None) -> Task:
    """The task of the worker of this slot: the job's, or one that is made of its party's."""
    spec = parties.job_of(job, slot).job.task
    place = spec, Path(spec.rpartition(":")[0]).parent, run
    part, party = parts.of_job(job).of(slot), parties.party_of(job, slot)
    if not part.task or party is None:
        return load_task(*place)
    user, name = load_user(*place)
    options = registry.load("algorithms", job.algorithm.name).Options(**job.algorithm.options)
    made = registry.attribute(part.task)(user, options, party.name)
    return Task(made, name, () if part.has_data else ["model"])


def warn_of_changing_losses(method: str, model: nn.Module) -> None:
    """Warn of modules that make the loss of one dataset differ at the same parameters."""
    found = [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if module.training and _changes_losses(module)
    ]
    if found:
        more = f" and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
        log.warning(
            "%s compares losses of the whole dataset, which these modules change at the same "
            "parameters: %s%s; use p = 0 for dropout, GroupNorm or LayerNorm in place of batch "
            "normalisation, or have model() put these modules into eval mode",
            method, ", ".join(found[:SHOWN_MAX]), more,
        )  # fmt: skip


def _changes_losses(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return True
    name = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout"
    rate = getattr(module, name, 0.0)  # Attention and recurrent layers have a number as well.
    return isinstance(rate, int | float) and rate > 0


def _device(job: JobFile, slot: int, rank: int) -> torch.device:
    return choose_device(job.workers.device, slot * job.ranks + rank)


def _check_devices(job: JobFile, device: torch.device) -> None:
    """Raises DlctlError if ranks would share a GPU: NCCL does not support that."""
    ranks, count = job.replica.ranks, torch.cuda.device_count()
    if device.type == "cuda" and count < ranks:
        raise DlctlError(
            f"a replica of {ranks} processes needs as many GPUs, but this machine has {count}",
            hint='use workers.device = "cpu", or fewer in [replica]',
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _does_without_weights(job: JobFile, slot: int) -> bool:
    """Whether the initial weights are not on this host, and not needed: the servers get the trained
    values from worker-0, and the run stores the frozen ones.
    """
    named = job.job.weights
    if not named or addresses.is_like(named) or Path(named).exists() or slot == 0:
        return False
    shape = registry.load("algorithms", job.algorithm.name).shape
    if shape.model != "tables" or job.ranks > 1:
        return False  # Only the first process of a replica gets the run's values.
    log.warning("the weights are not on this host: using the run's (%s)", job.job.weights)
    return True


def freeze(model: nn.Module, groups: Sequence[ParameterGroup]) -> None:
    """Freeze the parameters of groups with `train = false`. Raises DlctlError if a pattern matches
    no parameter.
    """
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(name)
    known = [name for _, names in found.values() for name in names]
    if unmatched := parameter_groups.unmatched(groups, known):
        close = ", ".join(parameter_groups.close_to(unmatched, known))
        patterns = ", ".join(f'"{pattern:.100}"' for pattern in unmatched[:SHOWN_MAX])
        raise DlctlError(
            f"no parameter of the model has a name like {patterns}",
            where="match in [[parameters]] of the job file",
            hint=f"there are {len(known)} names, for example {close}",
        )
    for parameter, names in found.values():
        number = parameter_groups.group_of(groups, names)
        if number != parameter_groups.NONE and not groups[number].train:
            parameter.requires_grad_(False)


def make_engine(
    job: JobFile,
    target: str,
    replica: TorchReplica,
    rank: int = 0,
    ranks: int = 1,
    group: Any = None,
) -> Operations:
    """The engine of the job's method; target: "module:Class". Raises TaskError, and JobFailed if it
    is no engine.
    """
    name = job.algorithm.name
    options = registry.load("algorithms", name).Options(**job.algorithm.options)
    with calling(f"{name}: making its engine {target}"):
        place = EnginePlace(replica, options, rank, ranks, group)
        engine = registry.attribute(target)(place)
    return Operations(engine, name, calling)
