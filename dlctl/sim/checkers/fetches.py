"""A fetch yields the shard's values, however little of it was sent."""

from __future__ import annotations

import numpy as np

from dlctl.roles.worker.received_slice import Slice
from dlctl.roles.worker.shard_client import ShardClient
from dlctl.sim.checkers.base import Checker
from dlctl.sim.checkers.versions import Versions
from dlctl.sim.process import Process
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Peer, Send
from dlctl.wire.messages import Array

NEARLY = 2.0**-6
"""Twice the last bit of a number with 8 significant bits, the fewest that are sent, relative to it.
"""
_ANSWERS = (m.Parameters, m.SparseParameters)


class FetchesChecker(Checker):
    """Every slice that a worker writes into its model is bit-identical to the shard at the version
    that the worker assumes; where answers are rounded, to the rounded values that all workers see
    of that version. For methods in which only pushes change "w".
    """

    def __init__(self) -> None:
        self.whole = self.sparse = 0
        """Slices that were written into a model."""
        self._largest: dict[tuple[int, int], float] = {}
        """(shard, term) -> the largest parameter so far."""
        self._exact: set[tuple[Process, Peer, int]] = set()
        """(server, client, request) of requests for exact values."""
        self._versions = Versions()
        self._shards: dict[tuple[int, int, int], Array] = {}
        """(shard, term, version) -> its parameters, as sent to workers."""

    def on_effect(self, process: Process, effect: Effect) -> None:
        """A server answers: its state is, or was, this version."""
        if not isinstance(effect, Send) or not isinstance(effect.message, _ANSWERS):
            return
        answer, serving = effect.message, process.machine.serving  # type: ignore[attr-defined]
        if answer.table:
            return  # It is read beside the model.
        is_rounded = serving.parameters.summary.precision != "float32"
        if is_rounded and (process, effect.peer, answer.request) in self._exact:
            return  # It is evaluated, and no model is made of it.
        if is_rounded and answer.values.itemsize != 2:
            raise self.broken(f"{process} does not round what {effect.peer!r} trains with")
        exact, seen = self._versions.of(process, answer.version)
        key = (answer.shard, answer.term, answer.version)
        if not np.array_equal(self._shards.setdefault(key, seen.copy()), seen):
            raise self.broken(f"{process} has two states that are version {answer.version}")
        if is_rounded:
            self._check_is_near(process, key[:2], seen, exact)

    def _check_is_near(self, process: Process, key: tuple[int, int], seen: Array, w: Array) -> None:
        largest = max(float(np.abs(w).max(initial=0.0)), self._largest.get(key, 0.0))
        self._largest[key] = largest
        if np.abs(seen - w).max(initial=0.0) > NEARLY * largest:
            raise self.broken(f"of {process} workers see what it has never been")

    def on_message(self, process: Process, peer: Peer, message: m.Message) -> None:
        """A worker is about to receive an answer: from now on its model is checked."""
        self._versions.on_message(process)
        if isinstance(message, m.Fetch) and message.exact:
            self._exact.add((process, peer, message.request))
        training = getattr(process.machine, "training", None)
        if isinstance(message, _ANSWERS) and training is not None:
            training.fetcher.placed = lambda *placed: self._on_placed(process, *placed)

    def _on_placed(
        self, worker: Process, channel: ShardClient, arrived: Slice, model: Array
    ) -> None:
        self.whole += arrived.where is None
        self.sparse += arrived.where is not None
        key = (channel.shard, arrived.term, channel.basis.version)
        shard = self._shards.get(key)
        if shard is None or not np.array_equal(shard, model):
            raise self.broken(
                f"the model of {worker} is not what server-{channel.shard} (term "
                f"{arrived.term}) was at version {channel.basis.version}"
            )
