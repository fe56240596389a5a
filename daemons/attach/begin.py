"""`dlctl.attach`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from daemons.attach import context
from daemons.attach.alone import Alone
from daemons.attach.exchange import Exchange, Left
from daemons.attach.model_vector import ModelVector
from daemons.attach.run import Run, RunLink
from daemons.attach.session import AttachedWorker
from daemons.attach.user_line import user_line
from daemons.attach.user_optimizer import UserOptimizer
from dlctl.errors import DlctlError

__all__ = ["Left", "attach"]


def attach(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    evaluate: Callable[[nn.Module], Mapping[str, Any]] | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
) -> Run:
    """Make this script a worker of the run that has started it; alone, a run of one.

    optimizer: the script's own, which steps the model; for methods of gradients give
    `run.optimizer(model)` the gradients instead. evaluate: returns metrics of the model that it is
    called with. scheduler (one, or a sequence), scaler: saved in the run's checkpoints with the
    optimizer. Raises DlctlError for a model that cannot be trained in a run.
    """
    try:
        return _attach(model, optimizer, evaluate, scheduler, scaler)
    except DlctlError as error:
        error.where = error.where or user_line()
        raise


def _attach(
    model: nn.Module, optimizer: Optimizer | None, evaluate: Any, scheduler: Any, scaler: Any
) -> Run:
    process = context.started()
    if process is not None and process.session is not None:
        raise DlctlError(
            "dlctl.attach was called twice", hint="a process is one worker, with one model"
        )
    vector = ModelVector(model)
    schedulers = scheduler if isinstance(scheduler, Sequence) else [scheduler]
    kept = [each for each in schedulers if each is not None]
    own = None if optimizer is None else UserOptimizer(optimizer, vector, kept, scaler)
    evaluates = None if evaluate is None else partial(_evaluated, evaluate, model)
    link: RunLink
    if process is None:
        link = Alone(vector, own)
    else:
        link = session = AttachedWorker(process, vector, own)
    exchange = Exchange(link, vector, evaluates, has_scaler=scaler is not None)
    if process is not None:
        session.exchange = exchange
    return Run(link, model, vector, exchange)


def _evaluated(evaluate: Callable[[nn.Module], Mapping[str, Any]], model: nn.Module) -> Any:
    """In the modes that the model had before, afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        return evaluate(model)
    finally:
        for module, mode in modes:
            module.training = mode
