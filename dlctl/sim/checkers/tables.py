"""Tables beside the parameters: every acknowledged push is in them once, even if daemons die."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from dlctl.roles.coordinator.records import AddEvent
from dlctl.roles.coordinator.supervision.groups import LOST
from dlctl.roles.protocol.effects import Compute
from dlctl.roles.worker.services.collecting import Collecting
from dlctl.sim.checkers.base import Checker
from dlctl.sim.process import Process
from dlctl.sim.world import World
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Send
from dlctl.wire.messages import APPLIED, BUFFERED, DUPLICATE, Array

Key = tuple[int, int, int]
"""Slot, term and number of a push."""


class TablesChecker(Checker):
    """For a table of rule "add" whose pushes add natural numbers: at the end it contains at least
    all acknowledged pushes, and at most all sent pushes.
    """

    def __init__(self, table: int = 1) -> None:
        self.table = table
        self._sent: defaultdict[int, dict[Key, Array]] = defaultdict(dict)
        """Shard -> push -> float32[n]."""
        self._acknowledged: defaultdict[int, set[Key]] = defaultdict(set)

    def on_effect(self, process: Process, effect: Effect) -> None:
        if not isinstance(effect, Send):
            return
        match effect.message:
            case m.Push(slot, term, _, seq, table=self.table) as push:
                shard = int(str(effect.peer).rpartition("-")[2])
                self._sent[shard].setdefault((slot, term, seq), push.delta.arrays[0].copy())
            case m.Ack(shard, _, seq, outcome, table=self.table) if outcome in (APPLIED, DUPLICATE):
                worker = process.network.client(effect.peer)  # type: ignore[arg-type]
                identity = getattr(getattr(worker, "machine", None), "joining", None)
                me = identity.identity if identity is not None else None
                if me is not None:
                    self._acknowledged[shard].add((me.slot, me.term, seq))

    def at_end(self, world: World) -> None:
        last: dict[int, Array] = {}
        for process in world.processes:
            serving = getattr(process.machine, "serving", None)
            if serving is not None and len(serving.tables) > self.table:
                last[serving.index] = serving.tables[self.table].shard.w
        for shard, values in last.items():
            sent, known = self._sent[shard], self._acknowledged[shard]
            zeros = np.zeros(values.size)
            least = sum((sent[key].astype(float) for key in known if key in sent), zeros)
            most = sum((pushed.astype(float) for pushed in sent.values()), zeros)
            if (values < least).any():
                raise self.broken(f"table {self.table} of shard {shard} has lost a push")
            if (values > most).any():
                raise self.broken(f"table {self.table} of shard {shard} has a push twice")


class AnswersChecker(Checker):
    """No replica uses an answer of a process that it knows was replaced."""

    def __init__(self) -> None:
        self._late: dict[Process, m.PeerReply] = {}

    def on_message(self, process: Process, peer: object, message: m.Message) -> None:
        self._check(process)
        members = getattr(process.machine, "members", None)
        if isinstance(message, m.PeerReply) and hasattr(members, "known"):
            known = members.known.get(message.slot)  # type: ignore[union-attr]
            if known is None or known.term != message.term:
                self._late[process] = message

    def on_effect(self, process: Process, effect: Effect) -> None:
        self._check(process)

    def _check(self, process: Process) -> None:
        late = self._late.pop(process, None)
        asking = getattr(getattr(process.machine, "training", None), "asking", None)
        if late is not None and asking is not None and late.payload.arrays:
            used = asking.newest
            if used and used[0] is late.payload.arrays[0]:
                raise self.broken(f"{process} uses an answer of a replaced worker-{late.slot}")


class LeadChecker(Checker):
    """The clock of a method's lead continues across coordinators. For a lead that counts portions:
    at the end it has counted each once.
    """

    def at_end(self, world: World) -> None:
        if world.store.run.get("state") != "finished":
            return
        machine = world.coordinator.machine
        clock, done = machine.lead.side.clock, machine.data.pool.done_count  # type: ignore[attr-defined]
        if clock != done:
            raise self.broken(f"the lead is at clock {clock}, and {done} portions are done")


class GroupChecker(Checker):
    """For a method whose replicas make the same steps together: all living replicas begin a step
    with bit-identical models, even if others have died in a sum. If a replica dies after a sum and
    before it could transfer the result, the others repeat the sum without it. The run fails because
    of a lost model only if no living replica has it.
    """

    def __init__(self) -> None:
        self._models: dict[int, tuple[Process, Array]] = {}
        """Step -> a process that has computed with a model at it, and that model."""
        self._workers: dict[Process, Collecting] = {}
        self._at: dict[Process, int] = {}
        """The step that each has begun last."""
        self._behind: set[Process] = set()
        """Processes that compute a gradient queued after a pending step."""

    def on_effect(self, process: Process, effect: Effect) -> None:
        if isinstance(effect, AddEvent) and effect.kind == "state" and LOST in effect.text:
            self._check_model_is_lost()
        training = getattr(process.machine, "training", None)
        collecting = getattr(training, "collecting", None)
        if training is None or collecting is None:
            return
        is_stepping = training.steps.engines.is_at_work
        if process in self._behind and not is_stepping:
            self._behind.remove(process)
            self._compare(process, training.side)
        if not isinstance(effect, Compute):
            return
        self._workers[process] = collecting
        if collecting._joins or not collecting.number:
            return  # It has not taken part in anything yet.
        if not is_stepping:
            self._compare(process, training.side)
        elif effect.own_lr is None:
            self._behind.add(process)
        else:
            self._at[process] = training.side.step  # It makes its own step at once.

    def _compare(self, process: Process, side: Any) -> None:
        step, model = side.step, side.parameters
        if self._at.get(process) == step:
            return  # It may have made its own step already.
        self._at[process] = step
        holder, known = self._models.setdefault(step, (process, model.copy()))
        if np.array_equal(known, model):
            return
        if holder.alive and not holder.given_up:
            raise self.broken(f"{process} has another model at step {step} than {holder}")
        self._models[step] = process, model.copy()

    def _check_model_is_lost(self) -> None:
        for process, collecting in self._workers.items():
            is_there = process.alive and not process.given_up
            if is_there and collecting.has_model and not process.machine.training.parked:  # type: ignore[attr-defined]
                raise self.broken(f"the run fails because its model is lost, but {process} has it")


class BufferedChecker(Checker):
    """For a method that acknowledges pushes before it applies them: at the end a shard has counted
    at least all acknowledged and at most all sent pushes. Empty ones are not counted.
    """

    def __init__(self) -> None:
        self._sent: defaultdict[int, set[Key]] = defaultdict(set)
        self._acknowledged: defaultdict[int, set[Key]] = defaultdict(set)

    def on_effect(self, process: Process, effect: Effect) -> None:
        if isinstance(effect, Send) and isinstance(effect.message, m.Push):
            push = effect.message
            shard = int(str(effect.peer).rpartition("-")[2])
            if push.samples:
                self._sent[shard].add((push.slot, push.term, push.seq))

    def on_message(self, process: Process, peer: object, message: m.Message) -> None:
        me = getattr(getattr(process.machine, "joining", None), "identity", None)
        settles = (APPLIED, BUFFERED, DUPLICATE)
        if isinstance(message, m.Ack) and me is not None and message.outcome in settles:
            key = (me.slot, me.term, message.seq)
            self._acknowledged[message.shard] |= {key} & self._sent[message.shard]

    def at_end(self, world: World) -> None:
        for shard, known in self._acknowledged.items():
            servings = [getattr(p.machine, "serving", None) for p in world.processes]
            version = [s.shard.version for s in servings if s is not None and s.index == shard][-1]
            if not len(known) <= version <= len(self._sent[shard]):
                text = f"{len(known)} pushes are acknowledged, {len(self._sent[shard])} were sent"
                raise self.broken(f"shard {shard} has counted {version}; {text}")
