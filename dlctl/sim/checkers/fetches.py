"""What is fetched is what the shard was, however little of it has travelled."""

from __future__ import annotations

import numpy as np

from dlctl import messages as m
from dlctl.machine import Effect, Peer, Send
from dlctl.messages import Array
from dlctl.roles.basis import Slice
from dlctl.roles.channel import Channel
from dlctl.sim.checkers.base import Checker
from dlctl.sim.process import Process

_ANSWERS = (m.Parameters, m.SparseParameters)


class FetchesChecker(Checker):
    """Every slice that a worker puts into its model makes that, to the last bit, the shard as it
    was at the version that the worker takes it for. For methods in which only pushes change "w".
    """

    def __init__(self) -> None:
        self.whole = self.sparse = 0
        """Slices that were put into a model."""
        self._shards: dict[tuple[int, int, int], Array] = {}
        """(shard, generation, version) -> its parameters."""

    def on_effect(self, process: Process, effect: Effect) -> None:
        """A server answers: as it is now, it is at this version."""
        if not isinstance(effect, Send) or not isinstance(effect.message, _ANSWERS):
            return
        answer = effect.message
        w = process.machine.serving.shard.w  # type: ignore[attr-defined]
        known = self._shards.setdefault((answer.shard, answer.generation, answer.version), w.copy())
        if not np.array_equal(known, w):
            raise self.broken(f"{process} has two states that are version {answer.version}")

    def on_message(self, process: Process, peer: Peer, message: m.Message) -> None:
        """A worker is about to get an answer: from now on its model is looked at."""
        training = getattr(process.machine, "training", None)
        if isinstance(message, _ANSWERS) and training is not None:
            training.fetcher.placed = lambda *placed: self._on_placed(process, *placed)

    def _on_placed(self, worker: Process, channel: Channel, arrived: Slice, model: Array) -> None:
        self.whole += arrived.where is None
        self.sparse += arrived.where is not None
        key = (channel.shard, arrived.generation, channel.version)
        shard = self._shards.get(key)
        if shard is None or not np.array_equal(shard, model):
            raise self.broken(
                f"the model of {worker} is not what server-{channel.shard} (generation "
                f"{arrived.generation}) was at version {channel.version}"
            )
