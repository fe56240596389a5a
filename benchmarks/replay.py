"""The expected state of a server after a sequence of pushes, from the optimiser's formula.

A server that skips a push, applies one twice or applies something else may be fast. So every
gradient that is pushed during a measurement is replayed here, at a sample of its positions, and the
server's final state is compared with the result. No code of dlctl is used.
"""

from __future__ import annotations

from itertools import cycle

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]

PLACES = 10_000
"""Maximum number of sampled positions; enough that some are among the 1 % of a sparse push."""
RATE, EPS = 0.01, 1e-10
"""Defaults of dlctl's optimisers."""
RELATIVE, ABSOLUTE = 1e-5, 1e-7
"""Tolerance of a parameter. One push of 10,000 changes it by a ten-thousandth or more."""
SCALES = (1.0, -0.5, 2.0, -1.5)
"""Factors of successive gradients relative to the first. Adagrad is invariant to a common scale,
but not to differences."""


class Replay:
    """An optimiser, "sgd" or "adagrad", at sampled positions of an initially zero vector."""

    def __init__(self, what: str, optimizer: str, size: int) -> None:
        """what: the measurement, for the error; starts with the name of the chapter."""
        self._what = what
        self._step = {"sgd": self._sgd, "adagrad": self._adagrad}[optimizer]
        self.where = np.unique(np.random.default_rng(0).integers(size, size=PLACES))
        """int64[n], the sampled positions."""
        self._w = np.zeros(self.where.size, np.float32)
        self._squares = np.zeros_like(self._w)
        self._pushes = 0

    def push(self, gradient: Vector, times: int = 1) -> None:
        """Replay this gradient, float32[size], zero where a sparse push has no entry."""
        self.push_there(gradient[self.where], times)

    def push_there(self, g: Vector, times: int = 1) -> None:
        """Replay a gradient that is `g` at the sampled positions."""
        self._pushes += times
        for _ in range(times):
            self._step(g)

    def compare(self, found: Vector, version: int) -> None:
        """Raises RuntimeError if `found`, float32[size], is not the result of the replayed pushes,
        or `version` is not their number."""
        if version != self._pushes:
            raise RuntimeError(f"{self._what}: version {version} after {self._pushes} pushes")
        here = found[self.where]
        if np.allclose(here, self._w, RELATIVE, ABSOLUTE):
            return
        off = float(np.abs(here - self._w).max())
        raise RuntimeError(
            f"{self._what}: the server's state after {self._pushes} pushes is wrong: it is off by "
            f"{off:g}; the largest expected value is {np.abs(self._w).max():g}"
        )

    def _sgd(self, g: Vector) -> None:
        self._w -= np.float32(RATE) * g

    def _adagrad(self, g: Vector) -> None:
        self._squares += g * g
        self._w -= np.float32(RATE) * (g / (np.sqrt(self._squares) + np.float32(EPS)))


class Gradients(Replay):
    """Gradients to push, one after the other, in the same memory: the consumer clears it."""

    def __init__(self, what: str, optimizer: str, size: int) -> None:
        super().__init__(what, optimizer, size)
        self._first = np.random.default_rng(1).standard_normal(size, dtype=np.float32)
        self._scales = cycle(SCALES)
        self.gradient: Vector = np.zeros(size, np.float32)

    def fill(self) -> None:
        """Fill in the next gradient and replay it: push it before the next call."""
        np.multiply(self._first, np.float32(next(self._scales)), out=self.gradient)
        self.push(self.gradient)
