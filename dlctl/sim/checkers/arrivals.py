"""A hook for checkers: a slice of the model at its arrival at a worker, before any step with it."""

from __future__ import annotations

from collections.abc import Callable

from dlctl.roles.worker.received_slice import Slice
from dlctl.roles.worker.shard_client import ShardClient
from dlctl.sim.process import Process
from dlctl.wire.messages import Array, Message, Parameters, SparseParameters


def when_placed(process: Process, message: Message, then: Callable[[int, Array], None]) -> None:
    """Call `then` with the shard and a copy of its slice after this answer is placed in the
    worker's model, if it is about to be.
    """
    training = getattr(process.machine, "training", None)
    if training is None or not isinstance(message, Parameters | SparseParameters):
        return
    another = training.fetcher.placed

    def placed(channel: ShardClient, arrived: Slice, model: Array) -> None:
        another(channel, arrived, model)
        then(channel.shard, model.copy())

    training.fetcher.placed = placed
