"""toy-table: Downpour, and a second table in which every replica counts what it has pushed.

Table "seen" has a cell for each of 64 slots, and one for all: every push of a gradient of n samples
adds n to two of them. A replica reads the table, its own writes included, and finds what it has
added. It guards durable tables beside the parameters, receipts, and reads beside the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlctl import messages
from dlctl.algorithms.base import MODEL, Method, Needs, PushOutcome, ReplicaSide, Shape, ShardSide
from dlctl.algorithms.base import Table as TableOf
from dlctl.algorithms.needs import Gradient, NextData, Read, Receipt, View, Write
from dlctl.compress.base import Delta
from dlctl.flat import Layout
from dlctl.messages import APPLIED

SLOTS = 64
EVERY = 4


@dataclass(slots=True, kw_only=True)
class Options:
    pass


def cells(layout: Layout) -> int:
    return SLOTS + 1


class Replica(ReplicaSide):
    def changes_parameters(self) -> bool:
        return False

    def run(self) -> Needs:
        view: View = yield Read(table="seen", wait=True, into="beside")
        assert view.values is not None
        before, own, step = float(view.values[self.slot]), 0, 0
        while True:
            data = yield NextData()
            if data is None:
                continue
            yield Read(wait=True)
            computed = yield Gradient()
            if computed is None:
                continue
            self.residual += computed.gradient
            yield Write(vector=self.residual, samples=computed.samples)
            seen = np.zeros(SLOTS + 1, np.float32)
            seen[[self.slot, SLOTS]] = computed.samples
            own, step = own + computed.samples, step + 1
            reads = step % EVERY == 0
            receipt: Receipt | None = yield Write(table="seen", vector=seen, wait=not reads)
            assert receipt is None or receipt.is_applied(), receipt
            if reads:
                view = yield Read(table="seen", wait=True, after_own=True, into="beside")
                assert view.values is not None
                # What a process before this one has pushed last may have come in meanwhile.
                assert view.values[self.slot] >= before + own, (view, before, own)


class Server(ShardSide):
    applies_as_pushed = True

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        self.shard.apply(delta, push.samples)
        return [push.outcome(APPLIED)]


TABLE = Method(
    Options=Options,
    replica=Replica,
    shard=Server,
    shape=Shape(tables=(MODEL, TableOf(name="seen", rule="add", size=cells))),
)
