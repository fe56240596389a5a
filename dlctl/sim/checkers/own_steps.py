"""Replicas of local SGD compute with the values sent by the shards, and their own steps."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from dlctl.roles.protocol.effects import Compute
from dlctl.roles.worker.training import Training
from dlctl.sim.checkers.arrivals import when_placed
from dlctl.sim.checkers.base import Checker
from dlctl.sim.objectives import Ledger
from dlctl.sim.process import Process
from dlctl.wire.machine import Effect, Peer
from dlctl.wire.messages import Array, Message


class OwnStepsChecker(Checker):
    """A replica of local SGD computes with the values sent by the shards and its own steps only:
    with all steps since its push, and with earlier ones only while their mean may be in flight.
    """

    def __init__(self, objective: Ledger) -> None:
        self.objective = objective
        self._sent: dict[tuple[Process, int], Array] = {}
        """(worker, shard) -> its slice of the model, as received."""
        self._pushed: defaultdict[Process, list[int]] = defaultdict(lambda: [0, 0])
        """Steps before the last push but one, and before the last one."""

    def on_message(self, process: Process, peer: Peer, message: Message) -> None:
        def placed(shard: int, model: Array) -> None:
            self._sent[process, shard] = model

        when_placed(process, message, placed)

    def on_effect(self, process: Process, effect: Effect) -> None:
        if not isinstance(effect, Compute):
            return
        training = process.machine.training  # type: ignore[attr-defined]
        pushed = self._pushed[process]
        if training.writing.steps_pushed != pushed[-1]:
            pushed[:] = pushed[-1], training.writing.steps_pushed
        for c in training.links.channels:
            model = training.side.parameters[c.lo : c.hi]
            own = np.flatnonzero(model != self._sent[process, c.shard])
            if not np.isin(self._cells(training, pushed[-1]), own).all():
                raise self.broken(f"{process} computes without steps that it has not pushed yet")
            if not np.isin(own, self._cells(training, pushed[0])).all():
                raise self.broken(f"{process} computes with steps of rounds that are over")

    def _cells(self, training: Training, first: int) -> list[int]:
        """The elements that the gradients from number `first` on have added 1 to."""
        me = training.links.identity
        numbers = range(first, training.writing.steps)
        return [self.objective.authors[me.slot, me.term, number] for number in numbers]
