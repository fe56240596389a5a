"""An account of split learning: each batch adds 1 to a cell of its own in f, and in h.

With plain SGD at lr = 1 the final weights say what became of each batch: in h it is once, whoever
asked and however often; in f too, if clients take turns. Clients in turn also note in f, beside the
batch, by how many batches the h of the answer was ahead of their f: in f is what was applied, so
the note is of the gradient that counted. Clients have a buffer, to which each sample adds 1 and its
number: if they take turns, each once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import numpy as np

from dlctl.algorithms.methods.split import BACKWARD, FORWARD, PREDICT, STEP
from dlctl.algorithms.methods.split_twin import received, sent
from dlctl.model.flat import AVERAGED, TRAINED, Layout, TensorEntry, slice_bounds
from dlctl.sim.checkers import Checker
from dlctl.sim.divided import ProblemOfParts
from dlctl.sim.objectives import Batch
from dlctl.sim.process import Process
from dlctl.sim.questions import Key, Question, Questions
from dlctl.sim.world import World
from dlctl.wire.machine import Effect, Peer, Send
from dlctl.wire.messages import LATE, Ack, Array, Json, Message, Push

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


class SentPush(NamedTuple):
    """A push of a client's f in a round."""

    seq: int
    samples: int
    cells: tuple[int, ...]


class Rounds:
    """What clients at work at once have sent, and what it makes of f."""

    def __init__(self, ledger: SplitLedger) -> None:
        self._ledger = ledger
        self._sent: dict[int, dict[tuple[int, int], SentPush]] = {}
        """Round -> slot and term -> its push."""
        self.terms: dict[int, int] = {}
        """Slot -> the term of its newest push; an ack has that of the shard."""
        self._late: set[tuple[int, int]] = set()
        """Slots and terms whose first push came behind its round."""

    def sent(self, push: Push) -> None:
        (values,) = push.delta.arrays
        cells = tuple(np.flatnonzero(values[: len(self._ledger.keys)]).tolist())
        self._sent.setdefault(push.clock, {})[push.slot, push.term] = SentPush(
            push.seq, push.samples, cells
        )

    def dropped(self, slot: int) -> None:
        self._late.add((slot, self.terms[slot]))

    def faults(self, f: Array) -> Iterator[str]:
        """Of rounds whose batches were computed once: a push has the share of its samples."""
        times = Counter(c for of in self._sent.values() for push in of.values() for c in push.cells)
        for clock, of in self._sent.items():
            if any(times[cell] > 1 for push in of.values() for cell in push.cells):
                continue
            in_time = [push for at, push in of.items() if push.seq or at not in self._late]
            come = [push for push in in_time if f[[*push.cells]].all()]
            total = sum(push.samples for push in come)
            for push in come:
                share, found = push.samples / total, f[[*push.cells]]
                if abs(found - share).max() > 1e-5:
                    yield f"round {clock}: {found.tolist()} of a batch, and the share is {share:g}"
            if len(come) < len(in_time):
                yield f"round {clock} has {len(come)} pushes of {len(in_time)}"


class SplitChecker(Checker):
    """Of a finished run: every batch is in h once. In turn it is in f once, too, computed with an h
    as far as f was, but for one batch at each death of the head.
    """

    def __init__(self, ledger: SplitLedger, heads: str) -> None:
        self.ledger = ledger
        self.heads = heads
        self._rounds = Rounds(ledger)

    def on_effect(self, process: Process, effect: Effect) -> None:
        if isinstance(effect, Send) and isinstance(effect.message, Push):
            push = effect.message
            self._rounds.terms[push.slot] = push.term
            is_of_client = effect.peer == "server-0" and not self.ledger.is_in_turn
            if is_of_client and push.samples and not push.portion:
                self._rounds.sent(push)

    def on_message(self, process: Process, peer: Peer, message: Message) -> None:
        """Who joins is waited for from its first push on, so that alone may come too late."""
        if isinstance(message, Ack) and message.outcome == LATE and not message.shard + message.seq:
            self._rounds.dropped(int(process.name.partition("-")[2]))

    def at_end(self, world: World) -> None:
        if world.store.run.get("state") != "finished":
            return
        cells, w = len(self.ledger.keys), world.weights()
        f, ahead, h = w[:cells], w[cells : 2 * cells], w[2 * cells :]
        self._check_h(h, world)
        if not self.ledger.is_in_turn:
            # A barrier drops what comes too late, and takes a batch that is computed again.
            if fault := next(self._rounds.faults(f), ""):
                raise self.broken(fault)
            return
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
