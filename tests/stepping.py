"""The loss and gradient of one batch, and the batch of a step that has a single one."""

from __future__ import annotations

from typing import Any, NamedTuple

from daemons.worker.data import PortionLoader
from daemons.worker.replica import Replica


class Step(NamedTuple):
    loss: float
    gradient: Any
    """float32[d]; the next step overwrites it."""


def gradient_of(replica: Replica, batch: Any) -> Step:
    """At the current parameters."""
    replica.forget_gradients()
    loss = replica.backward(batch).loss
    return Step(loss, replica.gathered(replica.gradients()))


def batch_of(loader: PortionLoader, data_epoch: int, start: int, stop: int, number: int) -> Any:
    ((batch, _),) = loader.step(data_epoch, start, stop, number).batches
    return batch
