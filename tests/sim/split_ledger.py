"""An account of split learning: each batch adds 1 to a cell of its own in f, and in h.

With plain SGD at lr = 1 the final weights say what became of each batch: in h it is once, whoever
asked and however often; in f too, if clients take turns. Clients in turn also note in f, beside the
batch, by how many batches the h of the answer was ahead of their f: in f is what was applied, so
the note is of the gradient that counted. Clients have a buffer, to which each sample adds 1 and its
number: if they take turns, each once.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from dlctl.algorithms.methods.split import BACKWARD, FORWARD, PREDICT, STEP
from dlctl.algorithms.methods.split_twin import received, sent
from dlctl.model.flat import AVERAGED, TRAINED, Layout, TensorEntry, slice_bounds
from dlctl.sim.checkers import Checker
from dlctl.sim.divided import ProblemOfParts
from dlctl.sim.objectives import Batch
from dlctl.sim.questions import Key, Question, Questions
from dlctl.sim.world import World
from dlctl.wire.messages import Array, Json

CELL, STEPS = 0, 1
"""Columns of z and of dL/dz: the cell of the batch, and how many batches f or h had."""


class SplitLedger(ProblemOfParts):
    def __init__(self, samples: int, portion_batches: int, batch_size: int, epochs: int) -> None:
        self.samples = samples
        self._most = portion_batches * batch_size
        self._batch = batch_size
        self.keys = [
            (epoch, portion, number)
            for epoch in range(epochs)
            for portion in range(-(-samples // self._most))
            for number in range(-(-self.length(portion) // batch_size))
        ]
        self.is_u = self.is_in_turn = False
        self.evaluates = True
        """Whether an evaluation asks the head, as that of a task without `evaluate` does not."""
        cells = len(self.keys)
        super().__init__(Client(self, "client.w", 2 * cells, samples), Head("head.w", cells))

    def length(self, portion: int) -> int:
        start, stop = slice_bounds(self.samples, -(-self.samples // self._most), portion)
        return stop - start


class _Cells:
    def __init__(self, name: str, size: int, samples: int = 0) -> None:
        entries = [TensorEntry(name, TRAINED, (size,), "float32")]
        entries += [TensorEntry("client.seen", AVERAGED, (1,), "float64")] if samples else []
        self.layout = Layout(tuple(entries))
        self.samples = samples

    def initial(self) -> Array:
        return np.zeros(self.layout.size(), np.float32)

    def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
        raise AssertionError("it asks, or is asked")

    def averaged(self, before: Array, batch: Batch) -> Array:
        return before + sum(1 + row for row in batch.rows) * bool(before.size)

    def evaluate(self, w: Array) -> Json:
        raise AssertionError("it asks, or is asked")


class Client(_Cells):
    def __init__(self, ledger: SplitLedger, name: str, size: int, samples: int) -> None:
        super().__init__(name, size, samples)
        self._ledger = ledger

    def asking(self, w: Array, batch: Batch, key: Key) -> Questions:
        ledger, cells = self._ledger, len(self._ledger.keys)
        cell = ledger.keys.index(key)
        z = np.zeros((len(batch.rows), 2), np.float32)
        z[:, CELL] = cell
        if ledger.is_u:
            answer: tuple[Array, ...] = ()
            while not answer:
                a = received(*(yield FORWARD, sent(z)))
                answer = yield BACKWARD, sent(a)
        else:
            *answer, _ = yield STEP, (*sent(z), *sent(np.zeros(len(z), np.int64)))
        slope = received(*answer)
        gradient = np.zeros(len(w), np.float32)
        gradient[cell] = -1.0
        if ledger.is_in_turn:
            gradient[cells + cell] = w[:cells].sum() - slope[0, STEPS]
        return 1.0, gradient

    def evaluating(self, w: Array) -> Generator[Question, tuple[Array, ...], Json]:
        if self._ledger.evaluates:
            yield PREDICT, sent(np.zeros((1, 2), np.float32))
        return {"applied": float(w.sum())}


class Head(_Cells):
    """`HeadLayers`."""

    def output(self, h: Array, z: Array) -> Array:
        return z

    def loss(self, output: Array, y: Array) -> tuple[float, Array]:
        return 1.0, output

    def backward(self, h: Array, z: Array, slope: Array) -> tuple[Array, Array]:
        by_z, by_h = z.copy(), np.zeros(len(h), np.float32)
        by_z[:, STEPS] = h.sum()
        by_h[int(z[0, CELL])] = -1.0
        return by_z, by_h


class SplitChecker(Checker):
    """Of a finished run: every batch is in h once. In turn it is in f once, too, computed with an h
    as far as f was, but for one batch at each death of the head.
    """

    def __init__(self, ledger: SplitLedger, heads: str) -> None:
        self.ledger = ledger
        self.heads = heads

    def at_end(self, world: World) -> None:
        if world.store.run.get("state") != "finished":
            return
        cells, w = len(self.ledger.keys), world.weights()
        f, ahead, h = w[:cells], w[cells : 2 * cells], w[2 * cells :]
        self._check_h(h, world)
        if not self.ledger.is_in_turn:
            return  # A barrier drops what comes too late, and takes a batch that is computed again.
        if lost := int((f == 0).sum()):
            raise self.broken(f"{lost} batches are not in f")
        if twice := int((f != 1).sum()):
            raise self.broken(f"{twice} batches are in f more than once")
        head = f"worker-{world.job.workers.count - 1}"
        buffers = world.machine("server-0").serving.buffers.average()
        epochs = len({epoch for epoch, _, _ in self.ledger.keys})
        rows = self.ledger.samples * (self.ledger.samples + 1) // 2
        if buffers[0] != 1 + epochs * rows:
            raise self.broken(f"the buffers are of {buffers[0] - 1:g}, not {epochs * rows}")
        deaths = sum(process.name == head for process in world.processes) - 1
        newer = int((ahead != 0).sum())
        if newer > deaths:
            raise self.broken(
                f"f has gradients of {newer} batches at a newer h, and the head died {deaths} times"
            )

    def _check_h(self, h: Array, world: World) -> None:
        if lost := int((h == 0).sum()):
            raise self.broken(f"{lost} batches are not in h")
        if self.heads == "one" and (twice := int((h != 1).sum())):
            raise self.broken(f"{twice} batches are in h more than once")
        shard: Any = world.machine("server-1").serving.shard
        most = self.ledger.samples * len({epoch for epoch, _, _ in self.ledger.keys})
        if shard.samples != most:
            raise self.broken(f"h has {shard.samples} samples of {most}")
