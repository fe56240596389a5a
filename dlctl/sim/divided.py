"""A problem that is divided among parties: two linear layers, the cut between them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Literal

import numpy as np

from dlctl.algorithms.methods.split import BACKWARD, FORWARD, PREDICT, STEP
from dlctl.algorithms.methods.split_twin import received, sent
from dlctl.model.flat import AVERAGED, TRAINED, Layout, TensorEntry
from dlctl.sim.objectives import Batch, Objective
from dlctl.sim.questions import Key, Question, Questions
from dlctl.wire.messages import Array, Json

INPUTS, CUT, OUTPUTS = 4, 3, 2
Keeps = Literal["", "count", "means"]


class ProblemOfParts:
    """A problem of parts: its vector is theirs, one behind the other, and they compute."""

    def __init__(self, *parts: Objective) -> None:
        self.parts = parts
        self.layout = Layout(tuple(entry for part in parts for entry in part.layout.entries))

    def initial(self) -> Array:
        return np.concatenate([part.initial() for part in self.parts])

    def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
        raise AssertionError("the parts compute it")

    def averaged(self, before: Array, batch: Batch) -> Array:
        return before

    def evaluate(self, w: Array) -> Json:
        raise AssertionError("the parts compute it")


class DividedLeastSquares(ProblemOfParts):
    """Mean of |x F H - y|^2 / 2 over the rows; with `is_u` of |x F H T - y|^2 / 2, T the clients'.

    F is [INPUTS, CUT], H [CUT, OUTPUTS], T [OUTPUTS, OUTPUTS]. `keeps`: the clients have buffers:
    "count", 1 and how many samples this replica has seen; "means", running means of x.
    """

    def __init__(
        self, samples: int = 64, seed: int = 0, *, is_u: bool = False, keeps: Keeps = ""
    ) -> None:
        rng = np.random.default_rng([seed, 21])
        self.samples, self.is_u, self.keeps = samples, is_u, keeps
        self.x = rng.standard_normal((samples, INPUTS)).astype(np.float32)
        self.y = (self.x @ rng.standard_normal((INPUTS, OUTPUTS))).astype(np.float32)
        tops = {"client.f": (INPUTS, CUT)} | ({"top.t": (OUTPUTS, OUTPUTS)} if is_u else {})
        client = ClientLayers(self, tops, rng)
        if keeps:
            size = INPUTS if keeps == "means" else 1
            seen = TensorEntry("client.seen", AVERAGED, (size,), "float64")
            client.layout = Layout((*client.layout.entries, seen))
        super().__init__(client, OutputLayer({"head.h": (CUT, OUTPUTS)}, rng))


class _Layers:
    """A part: matrices, one behind the other in a vector."""

    def __init__(self, shapes: dict[str, tuple[int, int]], rng: np.random.Generator) -> None:
        self.shapes = shapes
        rows = (TensorEntry(name, TRAINED, shape, "float32") for name, shape in shapes.items())
        self.layout = Layout(tuple(rows))
        self._initial = rng.standard_normal(self.layout.size()).astype(np.float32) / 2
        self.samples = 0

    def initial(self) -> Array:
        return self._initial.copy()

    def matrices(self, w: Array) -> list[Array]:
        sizes = np.cumsum([rows * columns for rows, columns in self.shapes.values()])
        cut = np.split(w, sizes[:-1])
        return [part.reshape(shape) for part, shape in zip(cut, self.shapes.values(), strict=True)]

    def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
        raise AssertionError("it asks, or is asked")

    def averaged(self, before: Array, batch: Batch) -> Array:
        return before

    def evaluate(self, w: Array) -> Json:
        raise AssertionError("it asks, or is asked")


class ClientLayers(_Layers):
    def __init__(self, whole: DividedLeastSquares, shapes: Any, rng: np.random.Generator) -> None:
        super().__init__(shapes, rng)
        self._whole, self.samples = whole, whole.samples

    def asking(self, w: Array, batch: Batch, key: Key) -> Questions:
        x, y = self._whole.x[batch.rows], self._whole.y[batch.rows]
        f, *top = self.matrices(w)
        z = x @ f
        if not self._whole.is_u:
            *by_z, losses = yield STEP, (*sent(z), *sent(y))
            return float(losses[0]), (x.T @ received(*by_z)).ravel()
        answer: tuple[Array, ...] = ()
        while not answer:
            a = received(*(yield FORWARD, sent(z)))
            loss, slope = mean_square(a @ top[0], y)
            answer = yield BACKWARD, sent(slope @ top[0].T)
        by_f, by_t = x.T @ received(*answer), a.T @ slope
        return loss, np.concatenate([by_f.ravel(), by_t.ravel()])

    def averaged(self, before: Array, batch: Batch) -> Array:
        if self._whole.keeps == "means":
            return running_means(before, self._whole.x[batch.rows])
        return before + len(batch.rows) * bool(before.size)

    def evaluating(self, w: Array) -> Generator[Question, tuple[Array, ...], Json]:
        f, *top = self.matrices(w)
        output = received(*(yield PREDICT, sent(self._whole.x @ f)))
        loss, _ = mean_square(output @ top[0] if top else output, self._whole.y)
        return {"loss": loss}


class OutputLayer(_Layers):
    """`HeadLayers` of one matrix."""

    def output(self, h: Array, z: Array) -> Array:
        (matrix,) = self.matrices(h)
        return z @ matrix

    def loss(self, output: Array, y: Array) -> tuple[float, Array]:
        return mean_square(output, y)

    def backward(self, h: Array, z: Array, slope: Array) -> tuple[Array, Array]:
        (matrix,) = self.matrices(h)
        return slope @ matrix.T, (z.T @ slope).ravel()


def running_means(before: Array, x: Array) -> Array:
    """As a BatchNorm's: the order of the batches matters."""
    means: Array = 0.9 * before + 0.1 * x.mean(0, np.float64)
    return means


def mean_square(output: Array, y: Array) -> tuple[float, Array]:
    """The mean of |output - y|^2 / 2, and its gradient."""
    error = output - y
    return float((error * error).sum()) / (2 * len(y)), error / np.float32(len(y))
