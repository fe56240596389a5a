"""What a server must have after so many pushes: the same gradients, and the optimiser's formula.

A server that leaves out a push, applies one twice or applies something else may be fast. So every
gradient that is pushed while dlctl is measured goes through here, too, at some of its places, and
what the server has in the end is compared with what has come of it here. Nothing of dlctl is used.
"""

from __future__ import annotations

from itertools import cycle

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]

PLACES = 10_000
"""At most; enough that some of them are among the 1 % of a sparse push."""
RATE, EPS = 0.01, 1e-10
"""Of dlctl's optimisers, for a job that says nothing else."""
RELATIVE, ABSOLUTE = 1e-5, 1e-7
"""How far a parameter may be off. One push of 10,000 makes a tenth of a thousandth or more."""
SCALES = (1.0, -0.5, 2.0, -1.5)
"""One gradient after the other is so many times the first one. Adagrad alone would not notice how
large they all are, only how they differ."""


class Replay:
    """An optimiser, "sgd" or "adagrad", at some places of a vector that begins with zeros."""

    def __init__(self, what: str, optimizer: str, size: int) -> None:
        """what: is measured; for the error, with the name of the chapter in front."""
        self._what = what
        self._step = {"sgd": self._sgd, "adagrad": self._adagrad}[optimizer]
        self.where = np.unique(np.random.default_rng(0).integers(size, size=PLACES))
        """int64[n], the places that are looked at."""
        self._w = np.zeros(self.where.size, np.float32)
        self._squares = np.zeros_like(self._w)
        self._pushes = 0

    def push(self, gradient: Vector, times: int = 1) -> None:
        """Of this gradient, float32[size], zero where a sparse push has nothing."""
        self.push_there(gradient[self.where], times)

    def push_there(self, g: Vector, times: int = 1) -> None:
        """Of a gradient that is `g` at the places that are looked at."""
        self._pushes += times
        for _ in range(times):
            self._step(g)

    def compare(self, found: Vector, version: int) -> None:
        """Raises RuntimeError if this, float32[size], is not what so many pushes make, or is said
        to be what another number of them has made."""
        if version != self._pushes:
            raise RuntimeError(f"{self._what}: version {version} after {self._pushes} pushes")
        here = found[self.where]
        if np.allclose(here, self._w, RELATIVE, ABSOLUTE):
            return
        off = float(np.abs(here - self._w).max())
        raise RuntimeError(
            f"{self._what}: the server does not have what {self._pushes} pushes make: it is off by "
            f"{off:g}, where the largest is {np.abs(self._w).max():g}"
        )

    def _sgd(self, g: Vector) -> None:
        self._w -= np.float32(RATE) * g

    def _adagrad(self, g: Vector) -> None:
        self._squares += g * g
        self._w -= np.float32(RATE) * (g / (np.sqrt(self._squares) + np.float32(EPS)))


class Gradients(Replay):
    """Gradients to push, one after the other, in the same memory: whoever takes one clears it."""

    def __init__(self, what: str, optimizer: str, size: int) -> None:
        super().__init__(what, optimizer, size)
        self._first = np.random.default_rng(1).standard_normal(size, dtype=np.float32)
        self._scales = cycle(SCALES)
        self.gradient: Vector = np.zeros(size, np.float32)

    def fill(self) -> None:
        """The next one. It is replayed, too: it must be pushed before the one after it."""
        np.multiply(self._first, np.float32(next(self._scales)), out=self.gradient)
        self.push(self.gradient)
