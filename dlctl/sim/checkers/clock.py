"""With a barrier every gradient is of the newest mean: a bound of staleness."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from dlctl.roles.protocol.effects import Compute
from dlctl.roles.protocol.loop_effects import LendModel
from dlctl.sim.checkers.arrivals import when_placed
from dlctl.sim.checkers.base import Checker
from dlctl.sim.checkers.versions import Versions
from dlctl.sim.process import Process
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Peer, Send
from dlctl.wire.messages import Array, Message

Where = tuple[Process, int]
"""(worker, shard)."""


class ClockChecker(Checker):
    """For `sync` and `local-sgd`. A worker that has pushed for step t computes with the result of
    step t on all shards, not with their parameters at t; and a push for step t is of all shards'
    parameters at t. If rounds overlap (`ahead` = 1), a worker that has pushed for t may still
    compute with these.

    The checker does not trust the versions that a worker states: it compares its model.
    """

    def __init__(self, *, ahead: int = 0) -> None:
        self.ahead = ahead
        self._versions = Versions()
        self._states: defaultdict[tuple[int, bytes], set[int]] = defaultdict(set)
        """(shard, its parameters as sent) -> the steps at which it had them: several, if no worker
        had any data at some."""
        self._placed: dict[Where, Array] = {}
        """The newest slice in the model, without own steps."""
        self._steps: dict[Where, set[int]] = {}
        """The steps of the parameters that the last gradient was computed with."""
        self._newest: dict[Process, int] = {}
        """The newest step that a worker has pushed for."""
        self._pushed: set[tuple[Process, int, int]] = set()
        """(worker, shard, number of a push) of observed pushes."""

    def on_message(self, process: Process, peer: Peer, message: Message) -> None:
        """A worker is about to receive an answer: from now on its model is checked."""
        self._versions.on_message(process)

        def placed(shard: int, model: Array) -> None:
            self._placed[process, shard] = model

        when_placed(process, message, placed)

    def on_effect(self, process: Process, effect: Effect) -> None:
        match effect:
            case Compute(own_lr=own_lr):
                self._on_compute(process, is_own=own_lr is not None)
            case LendModel(steps_own=is_own):
                self._on_compute(process, is_own=is_own)
            case Send(
                _, m.Parameters(shard, table=0) | m.SparseParameters(shard, table=0) as answer
            ):
                sent = self._versions.of(process, answer.version).exact
                self._states[shard, sent.tobytes()].add(answer.version)
            case Send(peer, m.Push(table=0) as push):
                self._on_push(process, int(str(peer).rpartition("-")[2]), push)

    def _on_compute(self, worker: Process, *, is_own: bool) -> None:
        """is_own: the replica makes steps of its own."""
        training = worker.machine.training  # type: ignore[attr-defined]
        newest = self._newest.get(worker, -1)
        for c in training.links.channels:
            placed = self._placed[worker, c.shard]
            model = training.side.parameters[c.lo : c.hi]
            if not is_own and not np.array_equal(model, placed):
                raise self.broken(f"{worker} computes with what server-{c.shard} has not sent")
            steps = self._steps[worker, c.shard] = self._states[c.shard, placed.tobytes()]
            if max(steps, default=-1) <= newest - self.ahead:
                raise self.broken(
                    f"{worker} has pushed for step {newest}, and computes with what "
                    f"server-{c.shard} was at {sorted(steps)}"
                )

    def _on_push(self, worker: Process, shard: int, push: m.Push) -> None:
        key = (worker, shard, push.seq)
        if key in self._pushed:
            return
        self._pushed.add(key)
        self._newest[worker] = max(push.clock, self._newest.get(worker, -1))
        steps = self._steps.get((worker, shard), set())
        if push.samples and not self.ahead and push.clock not in steps:
            raise self.broken(
                f"{worker} pushes for step {push.clock} what is of server-{shard} at "
                f"{sorted(steps)}"
            )
