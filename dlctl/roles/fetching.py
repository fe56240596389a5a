"""Slices on their way from the servers to a worker: for training, and for evaluations beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlctl.messages import Array, Parameters
from dlctl.roles.channel import Channel
from dlctl.roles.meters import Latency, Rates
from dlctl.roles.outbox import Outbox
from dlctl.vector import Vector, copy_into


@dataclass(slots=True)
class Fetched:
    """One fetch of all shards, as far as it has come."""

    request: int
    missing: int
    slices: dict[int, Parameters] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.missing == 0


class Fetcher:
    def __init__(self, channels: list[Channel], outbox: Outbox, rates: Rates) -> None:
        self.channels = channels
        self.outbox = outbox
        self.rates = rates
        self.latency = Latency()
        self._requests = 0
        self._under_way: dict[int, Fetched] = {}

    def start(self, clock_min: int, now: float) -> Fetched:
        """Ask every shard for its slice; the sends go out with the outbox."""
        self._requests += 1
        fetched = Fetched(self._requests, len(self.channels))
        self._under_way[fetched.request] = fetched
        for c in self.channels:
            message, nbytes = c.fetch(fetched.request, clock_min), 4 * (c.hi - c.lo)
            self.outbox.queue("fetch", c.fetch_key(fetched.request), c.peer, message, nbytes)
        return fetched

    def on_parameters(self, message: Parameters, now: float) -> None:
        """A slice has come; a repeated or unknown one is dropped."""
        took_s = self.channels[message.shard].on_parameters(message, now)
        fetched = self._under_way.get(message.request)
        if took_s is None or fetched is None:
            return
        self.latency.add(took_s)
        self.rates.add("fetch_bytes", message.values.nbytes)
        fetched.slices[message.shard] = message
        fetched.missing -= 1
        if fetched.complete:
            del self._under_way[message.request]

    def place(self, fetched: Fetched, parameters: Vector) -> None:
        """Put what has come into the model; the gradients to come are of it."""
        for shard, message in fetched.slices.items():
            channel = self.channels[shard]
            copy_into(parameters[channel.lo : channel.hi], message.values)
            channel.version = message.version
        fetched.slices.clear()

    def assemble(self, fetched: Fetched, into: Array) -> Array:
        """The whole vector of a complete fetch, beside the model."""
        for shard, message in fetched.slices.items():
            into[self.channels[shard].lo : self.channels[shard].hi] = message.values
        return into
