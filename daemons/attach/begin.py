"""`dlctl.attach`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import nn
from torch.optim import Optimizer

from daemons.attach import context, groups
from daemons.attach.alone import Alone
from daemons.attach.context import LaterProcess, ScriptProcess
from daemons.attach.exchange import Exchange, Left
from daemons.attach.group_link import GroupLink
from daemons.attach.model_vector import ModelVector
from daemons.attach.pace import Together
from daemons.attach.ranks import GroupRanks
from daemons.attach.run import Run, RunLink
from daemons.attach.session import AttachedWorker
from daemons.attach.user_line import user_line
from daemons.attach.user_optimizer import UserOptimizer
from dlctl.errors import DlctlError
from dlctl.job.config import Timeouts

__all__ = ["Left", "attach"]
P = TypeVar("P", bound=ScriptProcess | LaterProcess | None)


def attach(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    evaluate: Callable[[nn.Module], Mapping[str, Any]] | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    group: Any = None,
) -> Run:
    """Make this script a worker of the run that has started it; alone, a run of one.

    optimizer: the script's own, which steps the model; for methods of gradients give
    `run.optimizer(model)` the gradients instead. evaluate: returns metrics of the model that it is
    called with. scheduler (one, or a sequence), scaler: saved in the run's checkpoints with the
    optimizer. group: if the replica is several processes (DDP, FSDP2), their group of
    torch.distributed, or True for all; each of them calls this. Raises DlctlError for a model that
    cannot be trained in a run.
    """
    try:
        with_it = _Given(model, optimizer, evaluate, scheduler, scaler)
        return _attach_group(with_it, group) if group else _attach(with_it)
    except DlctlError as error:
        error.where = error.where or user_line()
        raise


class _Given(NamedTuple):
    model: nn.Module
    optimizer: Optimizer | None
    evaluate: Callable[[nn.Module], Mapping[str, Any]] | None
    scheduler: Any
    scaler: Any

    def own(self, vector: ModelVector) -> UserOptimizer | None:
        several = isinstance(self.scheduler, Sequence)
        schedulers = self.scheduler if several else [self.scheduler]
        kept = [each for each in schedulers if each is not None]
        if self.optimizer is None:
            return None
        return UserOptimizer(self.optimizer, vector, kept, self.scaler)

    def run(self, link: RunLink, vector: ModelVector, ranks: GroupRanks | None = None) -> Run:
        evaluates = None
        if self.evaluate is not None:
            evaluates = partial(_evaluated, self.evaluate, self.model)
        exchange = Exchange(
            link, vector, evaluates, has_scaler=self.scaler is not None, ranks=ranks,
            pace=None if ranks is None else Together(ranks),
        )  # fmt: skip
        return Run(link, self.model, vector, exchange)


def _attach(given: _Given) -> Run:
    groups.check_alone()
    process = _first_time(context.started())
    vector = ModelVector(given.model)
    link = _link(process, vector, given.own(vector))
    return _known(process, given.run(link, vector))


def _attach_group(given: _Given, group: Any) -> Run:
    from daemons.attach.group_copies import GroupCopies, check_mesh

    process, later = _first_time(context.started()), _first_time(context.later())
    rank = 0 if process is not None else None if later is None else later.rank
    job = process.context.job if process is not None else None if later is None else later.job
    limits = Timeouts() if job is None else job.timeouts
    processes = None if job is None else job.workers.processes
    ranks = groups.begin(group, processes, rank, limits.ready_s)
    vector = ModelVector(given.model, GroupCopies(ranks))
    groups.check_same(ranks, vector.layout)
    for parameter in vector.parameters:
        check_mesh(vector.name_of(parameter) or "", parameter, ranks)
    link = GroupLink(ranks, vector, given.own(vector), partial(_link, process))
    return _known(process or later, given.run(link, vector, ranks))


def _link(
    process: ScriptProcess | None, vector: ModelVector, own: UserOptimizer | None
) -> AttachedWorker | Alone:
    return Alone(vector, own) if process is None else AttachedWorker(process, vector, own)


def _first_time(process: P) -> P:
    """Raises DlctlError if it has attached already."""
    if process is not None and process.session is not None:
        raise DlctlError(
            "dlctl.attach was called twice", hint="a process is one worker, with one model"
        )
    return process


def _known(process: ScriptProcess | LaterProcess | None, run: Run) -> Run:
    if isinstance(process, LaterProcess):
        process.session = run.exchange
    elif process is not None and isinstance(process.session, AttachedWorker):
        process.session.exchange = run.exchange
    return run


def _evaluated(evaluate: Callable[[nn.Module], Mapping[str, Any]], model: nn.Module) -> Any:
    """In the modes that the model had before, afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        return evaluate(model)
    finally:
        for module, mode in modes:
            module.training = mode
