"""Somebody has taken a worker's process and its key: it says whatever the wire lets through.

From then on the process itself is frozen. Its messages are those that it sent before, with numbers
as extreme as their types allow. Its pushes hold zeros, so that the ledger has no cells of its own;
everybody else's have to be there. In the end it is killed, as somebody would who has noticed.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from dlctl.compress.plain import nothing
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.checkers import Book, Checker
from dlctl.sim.checkers.book import PushKey
from dlctl.sim.process import Process
from dlctl.sim.simulation import Simulation
from dlctl.wire import codec
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Send
from dlctl.wire.messages import NumberRange

EVERY_S = 0.03
"""Between two lies."""
FIXED = {"run_id", "name", "slot", "term", "token", "incarnation", "version"}
"""A lie about who it is gets no further than the key: `test_unexpected_messages` has those."""


def extremes(limits: NumberRange, honest: float = 0) -> list[Any]:
    """What is within the limits, and far from what is usual."""
    kind = type(limits.least)
    near = [honest - 1, honest + 1, 0, 1]
    within = [kind(value) for value in (*near, limits.least, limits.most) if limits.allow(value)]
    return [*within, float("nan")] if limits.allows_nan else within


def numbers_of(kind: type[m.Message]) -> dict[str, tuple[NumberRange, bool]]:
    """The numeric fields of a message: their limits, and whether they are tuples of numbers."""
    found = {}
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):  # type: ignore[arg-type]
        hint = hints[field.name]
        is_tuple = get_origin(hint) is tuple
        limits = codec.limits_of(get_args(hint)[0] if is_tuple else hint)
        if limits is not None:
            found[field.name] = limits, is_tuple
    return found


class Thief(Checker):
    """worker-1 from `from_s` on; it begins to lie when what it had sent before has arrived."""

    def __init__(
        self, simulation: Simulation, seed: int, book: Book, from_s: float, until_s: float
    ) -> None:
        self.world = simulation.world
        self.book = book
        self._struck = simulation.injector.struck
        self._is_rash = seed % 3 == 0
        self._rng = np.random.default_rng([seed, 11])
        self._honest: dict[tuple[Any, type[m.Message]], m.Message] = {}
        """(peer, type) -> the newest message of this type that it sent there."""
        self._process: Process | None = None
        self._until_s = until_s
        simulation.at(from_s, self._begin)
        simulation.at(until_s, self._end)
        self.world.observers.append(self)

    def on_effect(self, process: Process, effect: Effect) -> None:
        if process.name == "worker-1" and isinstance(effect, Send):
            self._honest[effect.peer, type(effect.message)] = effect.message

    def _begin(self) -> None:
        process = self.world.process("worker-1")
        if process.alive and any(kind is m.Push for _, kind in self._honest):
            self._process = process
            process.freeze()
            self._choose_kinds(process)
            self.world.timeline.after(1.0, self._lie)

    def _choose_kinds(self, process: Process) -> None:
        """In every third run the lies that take the worker out at once are among them."""
        who = self.book.who[process]
        found: list[m.Message] = [m.GroupBroken(*who, 1, "made up", "")]
        if self._is_rash:
            found.append(m.Failed("worker-1", "made up", "", True))
            found.append(m.SampleFailed(*who, 0, 1, "made up", "", 0))
        else:
            self._honest.pop((COORDINATOR, m.ModelReady), None)
        self._honest |= {(COORDINATOR, type(message)): message for message in found}

    def _end(self) -> None:
        if self._process is not None and self._process.alive:
            self._process.end(-9)

    def _lie(self) -> None:
        process = self._process
        if process is None or not process.alive or self.world.timeline.now >= self._until_s:
            return
        keys = sorted(self._honest, key=lambda key: (str(key[0]), key[1].__name__))
        peer, kind = keys[self._rng.integers(len(keys))]
        lie = self._changed(self._honest[peer, kind])
        if isinstance(lie, m.Push):
            lie = self._push(str(peer), lie)
        self._struck["lies"] += 1
        self.world.network.send(process, peer, lie)
        self.world.timeline.after(EVERY_S, self._lie)

    def _changed(self, honest: m.Message) -> m.Message:
        found = {name: of for name, of in numbers_of(type(honest)).items() if name not in FIXED}
        names = sorted(found)
        count = min(len(names), int(self._rng.integers(1, 4)))
        changed: dict[str, Any] = {}
        for name in self._rng.permutation(names)[:count]:
            limits, is_tuple = found[name]
            values = extremes(limits, 0 if is_tuple else getattr(honest, name))
            one = values[self._rng.integers(len(values))]
            changed[str(name)] = (one,) * int(self._rng.integers(0, 4)) if is_tuple else one
        if isinstance(honest, m.Report):
            changed["metrics"] = {
                key: (2**62, -(2**62), float("inf"), None)[self._rng.integers(4)]
                for key in honest.metrics
            }
        return replace(honest, **changed)

    def _push(self, peer: str, lie: m.Push) -> m.Push:
        """Mostly the number that the server expects: all others are duplicates and gaps."""
        server = self.world.machine(peer).serving  # type: ignore[attr-defined]
        seq = lie.seq
        if server is not None and self._rng.random() < 0.8:
            seq = server.parameters.dedup.next_seq(lie.slot)
        delta = nothing(lie.delta.kind, lie.delta.length)
        shard = int(peer.rpartition("-")[2])
        key = PushKey(lie.slot, lie.term, shard, seq)
        if key not in self.book.acknowledged:
            self.book.cells[key] = np.zeros(0, np.int64)
        return replace(lie, seq=seq, delta=delta, table=min(lie.table, 1))
