"""toy-table: Downpour, and a second table in which every replica counts what it has pushed.

Table "seen" has a cell for each of 64 slots, and one for all: every push of a gradient of n samples
adds n to two of them. A replica reads the table, its own writes included, and finds what it has
added. It guards durable tables beside the parameters, receipts, and reads beside the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlctl.algorithms.base import MODEL, Method, Needs, ReplicaSide, Shape
from dlctl.algorithms.base import Table as TableOf
from dlctl.algorithms.methods.downpour import Server
from dlctl.algorithms.needs import NextData, Read, Receipt, View, Write
from dlctl.algorithms.stepwise import accrue
from dlctl.model.flat import Layout

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
            samples = yield from accrue(self)
            if not samples:
                continue
            yield self.write_residual(samples=samples)
            seen = np.zeros(SLOTS + 1, np.float32)
            seen[[self.slot, SLOTS]] = samples
            own, step = own + samples, step + 1
            reads = step % EVERY == 0
            receipt: Receipt | None = yield Write(table="seen", vector=seen, wait=not reads)
            assert receipt is None or receipt.is_applied(), receipt
            if reads:
                view = yield Read(table="seen", wait=True, after_own=True, into="beside")
                assert view.values is not None
                # What a process before this one has pushed last may have come in meanwhile.
                assert view.values[self.slot] >= before + own, (view, before, own)


TABLE = Method(
    Options=Options,
    replica=Replica,
    shard=Server,
    shape=Shape(tables=(MODEL, TableOf(name="seen", rule="add", size=cells))),
)
