"""The loss and gradient of one batch, the batch of a step that has a single one, and steppers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from daemons.worker import inner_optimizer
from daemons.worker.data.portion_loader import PortionLoader
from daemons.worker.replica import TorchReplica
from daemons.worker.stepper import Stepper
from daemons.worker.task.user_task import Task
from dlctl import registry
from dlctl.job.config import Choice, Gradients, ParameterGroup
from dlctl.model import parameter_groups
from dlctl.model.flat import TRAINED

SEED = 3


class Step(NamedTuple):
    loss: float
    gradient: Any
    """float32[d]; the next step overwrites it."""


def gradient_of(replica: TorchReplica, batch: Any) -> Step:
    """At the current parameters."""
    replica.forget_gradients()
    loss = replica.backward(batch).loss
    return Step(loss, replica.gathered(replica.gradients()))


def batch_of(loader: PortionLoader, data_epoch: int, start: int, stop: int, number: int) -> Any:
    ((batch, _),) = loader.step(data_epoch, start, stop, number).batches
    return batch


def choice(name: str, **options: Any) -> Choice:
    """An inner optimiser, with the defaults of its other options."""
    chosen = registry.load("inner_optimizers", name).Options(**options)
    return Choice(name=name, options=dataclasses.asdict(chosen))


def stepper_of(
    task: Any,
    chosen: Choice | None = None,
    groups: Sequence[ParameterGroup] = (),
    **gradients: Any,
) -> Stepper:
    """With the options of [gradient]."""
    options = Gradients(**gradients)
    how = {"precision": options.precision, "compiled": options.compile}
    task = task if isinstance(task, Task) else Task(task)
    replica = TorchReplica(task, device="cpu", seed=SEED, **how)
    of_values = parameter_groups.of_each(groups, replica.layout)
    names = [entry.name for entry, _, _ in replica.layout.slices(TRAINED)]
    optimizer = (
        inner_optimizer.make(chosen, replica.values, of_values, names)
        if chosen is not None
        else None
    )
    return Stepper(replica, options, optimizer)
