"""Slices on their way from the servers to a worker: for training, and for evaluations beside it.

For training a shard need only send what has changed since the slice that the worker has. Every
answer says what it is a change of; one that is of something else is not used, whenever and in
whatever order it may come, and the whole slice is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dlctl.messages import Array, Parameters, SparseParameters
from dlctl.roles.protocol.meters import Latency, Rates
from dlctl.roles.worker.basis import Slice
from dlctl.roles.worker.send_queue import SendQueue
from dlctl.roles.worker.shard_client import ShardClient
from dlctl.vector import Vector


@dataclass(slots=True)
class Fetched:
    """One fetch of all shards, as far as it has come."""

    request: int
    clock_min: int
    missing: int
    slices: dict[int, Slice] = field(default_factory=dict)
    charged: dict[int, int] = field(default_factory=dict)
    """Shard -> the bytes that its answer was expected to have."""

    @property
    def complete(self) -> bool:
        return self.missing == 0


Placed = Callable[[ShardClient, Slice, Vector], None]
"""Called with what has come and the part of the model that it was put into: where tests look."""


def nobody_looks(channel: ShardClient, arrived: Slice, model: Vector) -> None:
    """Nobody wants to know."""


class Fetcher:
    def __init__(self, channels: list[ShardClient], send_queue: SendQueue, rates: Rates) -> None:
        self.channels = channels
        self.send_queue = send_queue
        self.rates = rates
        self.latency = Latency()
        self.placed: Placed = nobody_looks
        self._requests = 0
        self._under_way: dict[int, Fetched] = {}
        self._model_changes = True

    def model_changes(self, changes: bool) -> None:
        """Whether the method may change the model by itself; to be said before it does."""
        self._model_changes = changes
        if changes:
            for channel in self.channels:
                channel.basis.will_change()

    def start(self, clock_min: int, *, whole: bool = False) -> Fetched:
        """Ask every shard for its slice; the sends go out with the send_queue.

        whole: all of it as it is, to be looked at beside the model; else only what has to be placed
        there, and rounded if the job says so.
        """
        self._requests += 1
        fetched = Fetched(self._requests, clock_min, len(self.channels))
        self._under_way[fetched.request] = fetched
        for channel in self.channels:
            self._ask(fetched, channel, whole=whole, exact=whole)
        return fetched

    def _ask(
        self, fetched: Fetched, channel: ShardClient, *, whole: bool, exact: bool = False
    ) -> None:
        message = channel.fetch(fetched.request, fetched.clock_min, whole=whole, exact=exact)
        nbytes = fetched.charged[channel.shard] = channel.expected_bytes(message)
        key = channel.fetch_key(fetched.request)
        self.send_queue.queue("fetch", key, channel.peer, message, nbytes)

    def on_parameters(self, message: Parameters | SparseParameters, now: float) -> None:
        """A slice has come; a repeated or unknown one is dropped.

        Raises RemoteProtocolError if it does not fit the shard.
        """
        answer = self.channels[message.shard].on_parameters(message, now)
        fetched = self._under_way.get(message.request)
        if answer is None or fetched is None:
            return
        self.latency.add(answer.took_s)
        self.rates.add("fetch_bytes", answer.nbytes)
        self.send_queue.correct("fetch", answer.nbytes - fetched.charged[message.shard], now)
        fetched.slices[message.shard] = answer.slice
        fetched.missing -= 1
        if fetched.complete:
            del self._under_way[message.request]

    def place(self, fetched: Fetched, parameters: Vector, then: Callable[[int, int], None]) -> None:
        """Put what has come into the model; the gradients to come are of it. `then` is called with
        the bounds of every slice that stands there.
        """
        for shard, arrived in fetched.slices.items():
            channel = self.channels[shard]
            if not channel.basis.fits(arrived):
                self._under_way[fetched.request] = fetched
                fetched.missing += 1
                self._ask(fetched, channel, whole=True)
                continue
            model = parameters[channel.lo : channel.hi]
            channel.basis.place(arrived, model, keep=self._model_changes)
            self.placed(channel, arrived, model)
            then(channel.lo, channel.hi)
        fetched.slices.clear()

    def assemble(self, fetched: Fetched, into: Array) -> Array:
        """The whole vector of a complete fetch that asked for all, beside the model."""
        for shard, arrived in fetched.slices.items():
            assert arrived.where is None
            into[self.channels[shard].lo : self.channels[shard].hi] = arrived.values
        return into
