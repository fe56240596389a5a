"""Gradients, pushes and acks of the workers of a ledger run; one book for all checkers.

It must come before the checkers that read it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from dlctl import registry
from dlctl.compress.plain import expand
from dlctl.roles.protocol.effects import Compute
from dlctl.sim.checkers.base import Checker
from dlctl.sim.checkers.stopped import StoppedBatches
from dlctl.sim.loops import Trained
from dlctl.sim.objectives import Ledger
from dlctl.sim.process import Process
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Peer, Send
from dlctl.wire.messages import APPLIED, DUPLICATE, LATE, REFUSED, Array


class PushKey(NamedTuple):
    """The identity of a push, unique over the whole run."""

    slot: int
    term: int
    shard: int
    seq: int


class DonePortion(NamedTuple):
    """A portion that a worker has reported done, and the cells of its gradients."""

    process: Process
    message: m.PortionDone
    cells: tuple[int, ...]


class Book(Checker):
    """Keeps the account, and checks that a resent push never changes."""

    def __init__(self, objective: Ledger) -> None:
        self.objective = objective
        self.who: dict[Process, tuple[int, int]] = {}
        """Worker -> (slot, term)."""
        self._peers: dict[tuple[Process, Peer], tuple[int, int]] = {}
        """(server, connection) -> the sender of its messages."""
        self.servers: dict[int, Process] = {}
        """Shard -> the process that has served it last."""
        self.cells: dict[PushKey, Array] = {}
        """The cells of each push, as positions within its shard."""
        self.bases: dict[PushKey, int] = {}
        """The base version that each push states."""
        self.samples: dict[PushKey, int] = {}
        """The samples that each push states."""
        self.acknowledged: set[PushKey] = set()
        """Pushes acknowledged as applied."""
        self.dropped: set[PushKey] = set()
        """Pushes settled without being applied: too late for their barrier, or refused."""
        self.done: list[DonePortion] = []
        self.is_dense = True
        """Whether a push takes the whole residual."""
        self._numbers: defaultdict[tuple[int, int, int, int, int], list[int]] = defaultdict(list)
        """(slot, term, data epoch, shard of a stream, start) -> numbers of the gradients of this
        portion."""
        self._computed: defaultdict[Process, int] = defaultdict(int)
        self._stopped = StoppedBatches()
        self._portions: dict[tuple[int, int, int, int, int], DonePortion] = {}
        """The same -> the newest portion of it that was reported done."""
        self._trained: defaultdict[tuple[int, int, int, int], list[int]] = defaultdict(list)
        """(slot, term, data epoch, portion) -> numbers of the gradients with samples of it, of
        training loops of the user's own."""
        self._starts: dict[tuple[int, int], tuple[int, int]] = {}
        """(data epoch, portion) -> shard of a stream, and where it starts."""

    def on_effect(self, process: Process, effect: Effect) -> None:
        is_again = self._stopped.is_again(process, effect)
        if isinstance(effect, Compute) and not is_again:
            key = (*self.who[process], effect.data_epoch, effect.shard, effect.start)
            self._numbers[key].append(self._computed[process])
            self._computed[process] += 1
        if isinstance(effect, Trained) and not effect.is_skipped:
            for piece in effect.pieces:
                portion = (*self.who[process], piece.data_epoch, piece.portion)
                self._trained[portion].append(effect.number)
        if not isinstance(effect, Send):
            return
        match effect.message:
            case m.Join(_, slot, term, _):
                self.who[process] = (slot, term)
            case m.Push(table=0):
                self._on_push(str(effect.peer), effect.message)
            case m.Joined(shard):
                self.servers[shard] = process
            case m.Ack():
                self._on_ack(process, effect.peer, effect.message)
            case m.Lease():
                lease = effect.message
                self._starts[lease.data_epoch, lease.portion] = (lease.shard, lease.start)
            case m.PortionDone():
                self.done.append(self._portion(process, effect.message))

    def on_message(self, process: Process, peer: Peer, message: m.Message) -> None:
        if isinstance(message, m.Join | m.Push):
            self._peers[process, peer] = (message.slot, message.term)

    def key(self, server: Process, peer: Peer, ack: m.Ack) -> PushKey | None:
        """The push to the parameters that an ack is for, whether its worker is still alive or not;
        None if there is none.
        """
        who = self._peers.get((server, peer))
        return PushKey(*who, ack.shard, ack.seq) if who is not None and not ack.table else None

    def unsettled(self, slot: int, term: int, shard: int) -> set[int]:
        """Cells of pushes that are not settled yet."""
        settled = self.acknowledged | self.dropped
        keys = [k for k in self.cells if k[:3] == (slot, term, shard) and k not in settled]
        return {int(cell) for key in keys for cell in self.cells[key]}

    def dropped_cells(self, shard: int) -> set[int]:
        """Cells that a method has dropped, as intended."""
        return {int(cell) for key in self.dropped if key.shard == shard for cell in self.cells[key]}

    def missing(self, done: DonePortion, shard: int, weights: Array) -> list[int]:
        """Cells of a portion that are lost: not in the shard's `weights`, and not dropped by the
        method. After a sparse push they may also be in the worker's residual, or in flight in a
        later push.
        """
        absent = [cell for cell in done.cells if not weights[cell]]
        if not absent:
            return []
        absent = [cell for cell in absent if cell not in self.dropped_cells(shard)]
        if self.is_dense:
            return absent
        waiting = self.unsettled(done.message.slot, done.message.term, shard)
        side = done.process.machine.training.side  # type: ignore[attr-defined]
        residual = side.residual[shard * self.objective.cells :]
        return [cell for cell in absent if cell not in waiting and not residual[cell]]

    def _on_push(self, peer: str, push: m.Push) -> None:
        key = PushKey(push.slot, push.term, int(peer.rpartition("-")[2]), push.seq)
        compressor = registry.load("compressors", push.delta.kind)
        delta = expand(compressor, push.delta, push.delta.length)
        used = np.flatnonzero(delta.values)
        cells = push.at + (used if delta.indices is None else delta.indices[used])
        if delta.values.size:  # An empty push is neither dense nor sparse.
            self.is_dense = delta.indices is None and not push.is_part
        known = self.cells.setdefault(key, cells)
        self.samples.setdefault(key, push.samples)
        base = self.bases.setdefault(key, push.base_version)
        if base != push.base_version or not np.array_equal(known, cells):
            raise self.broken(f"{key} was changed when it was sent again")

    def _on_ack(self, server: Process, peer: Peer, ack: m.Ack) -> None:
        key = self.key(server, peer, ack)
        if key is None:
            return
        if ack.outcome == APPLIED or (ack.outcome == DUPLICATE and key not in self.dropped):
            self.acknowledged.add(key)
        elif ack.outcome in (LATE, REFUSED):
            self.dropped.add(key)

    def _portion(self, process: Process, done: m.PortionDone) -> DonePortion:
        """A resent message is about the same gradients, although the portion may have been leased
        again to the same worker meanwhile.
        """
        portion = done.data_epoch, done.portion
        where = self._starts[portion]
        key = (done.slot, done.term, done.data_epoch, *where)
        known = self._portions.get(key)
        if known is None or known.message is not done:
            numbers = self._numbers[key]
            # After the end of a shard of a stream there is nothing to compute.
            numbers[:] = [n for n in numbers if (*key[:2], n) in self.objective.authors]
            mine, numbers[:] = numbers[: done.steps], numbers[done.steps :]
            mine += self._trained.pop((done.slot, done.term, *portion), [])
            cells = tuple(self.objective.authors[*key[:2], number] for number in mine)
            known = self._portions[key] = DonePortion(process, done, cells)
        return known
