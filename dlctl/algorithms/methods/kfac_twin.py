"""K-FAC's engine in numpy, for the simulator, whose problems have one layer: the output x.w of each
sample x. `daemons/worker/kfac/engine.py` is the one in torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dlctl.algorithms.engines import MethodEngine, Operation, TwinPlace
from dlctl.algorithms.methods.kfac_shapes import LayerSides, OfSide, Packing, side_of, upper
from dlctl.model.vector import all_finite
from dlctl.wire.messages import Array

EIGENVALUE_MIN = 1e-10
"""Below this, an eigenvalue of a factor is 0."""


@runtime_checkable
class IsLinear(Protocol):
    """A problem whose model is a linear layer without a bias."""

    def rows(self, w: Array, batch: Any) -> tuple[Array, Array]:
        """The layer's inputs, float64[n, a], and the gradients of the mean loss at its outputs,
        float64[n, g].
        """
        ...


class KfacTwin(MethodEngine):
    def __init__(self, place: TwinPlace) -> None:
        self._problem, self._parameters = place.problem, place.parameters
        size, max_dim = place.parameters.size, place.options.max_dim
        self.packing = Packing((LayerSides("w", side_of(size, max_dim), side_of(1, max_dim)),))
        self.factors = self.packing.initial()
        self.eigens = np.zeros(self.packing.eigen_size, np.float32)
        """Without the marks, which are in `_fresh`."""
        self._fresh = np.zeros((1, 2), np.uint8)
        self._shares = place.options.placement == "opt"
        self._may_record = self._records = False
        self._samples = 0
        self._rows: tuple[Array, Array] | None = None

    def operations(self) -> Mapping[str, Operation]:
        return {
            "describe": self.describe, "record": self.record, "factors": self.given_factors,
            "fold": self.fold, "renew": self.renew, "eigens": self.given_eigens,
            "take_eigens": self.take_eigens, "updates": self.updates,
            "along_opt": self.along_opt, "along_lw": self.along_lw, "give": self.give,
            "take": self.take,
        }  # fmt: skip

    # ------------------------------------------------------------ steps

    def begin_step(self, samples: int, scale: float) -> None:
        self._records, self._may_record = self._may_record, False
        self._samples, self._rows = samples, None

    def see_batch(self, batch: Any, part: float) -> None:
        if self._records and isinstance(self._problem, IsLinear):
            self._rows = self._problem.rows(self._parameters, batch)

    def discard_step(self) -> None:
        self._rows = None

    # ------------------------------------------------------------ factors

    def describe(self) -> tuple[Array, Array]:
        return self.packing.costs(), np.array([self.give()[0].size])

    def record(self) -> tuple[Array, ...]:
        self._may_record = True
        return ()

    def given_factors(self) -> tuple[Array]:
        found = np.zeros(self.packing.factor_size, np.float32)
        if self._rows is None:
            return (found,)
        a, g = self._rows
        found[self.packing.seen] = 1.0
        of_a, of_g = self.packing.sides[0]
        if of_a.side.kind == "matrix":
            found[of_a.factor] = (a.T @ a / len(a))[upper(of_a.side.size)]
        found[of_g.factor] = (self._samples * g.T @ g)[upper(of_g.side.size)]
        self._rows = None
        return (found,)

    def fold(self, mean: Array, numbers: Array) -> tuple[Array, ...]:
        decay, seen = float(numbers[1]), float(mean[0])
        if not seen:
            return ()
        new = mean.copy()
        of_a, _ = self.packing.sides[0]
        new[of_a.factor] /= seen
        self.factors = np.float32(decay) * self.factors + np.float32(1 - decay) * new
        self.factors[0] = 1.0
        return ()

    # ------------------------------------------------------------ eigenvectors

    def renew(self) -> tuple[Array, ...]:
        self._fresh[:] = 0
        return ()

    def _decompose(self, mine: Array) -> None:
        for number, of_side in enumerate(self.packing.sides[0]):
            if mine[0, number] and not self._fresh[0, number]:
                self._fresh[0, number] = 1
                if of_side.side.kind == "matrix":
                    self.eigens[of_side.eigen] = decomposed(
                        self.factors[of_side.factor], of_side.side.size
                    )

    def given_eigens(self, mine: Array) -> tuple[Array]:
        self._decompose(mine)
        found = np.zeros(self.packing.eigen_size, np.float32)
        found[: self.packing.marks] = mine.ravel()
        for number, of_side in enumerate(self.packing.sides[0]):
            if mine[0, number]:
                found[of_side.eigen] = self.eigens[of_side.eigen]
        return (found,)

    def take_eigens(self, given: Array) -> tuple[Array, ...]:
        marks = given[: self.packing.marks].reshape(-1, 2) == 1
        for number, of_side in enumerate(self.packing.sides[0]):
            if marks[0, number]:
                self.eigens[of_side.eigen] = given[of_side.eigen]
                self._fresh[0, number] = 1
        return ()

    # ------------------------------------------------------------ steps along the mean

    def _preconditioned(self, mean: Array, damping: float) -> Array:
        """float32[g, a]"""
        of_a, of_g = self.packing.sides[0]
        v = mean.reshape(of_g.side.size, of_a.side.size)
        (qa, da), (qg, dg) = self._basis(of_a, 0), self._basis(of_g, 1)
        v = v if qg is None else qg.T @ v
        v = v if qa is None else v @ qa
        v = v / (np.outer(dg, da) + np.float32(damping))
        v = v if qg is None else qg @ v
        return v if qa is None else v @ qa.T

    def _basis(self, of_side: OfSide, number: int) -> tuple[Array | None, Array]:
        """(eigenvectors, eigenvalues); None: the identity."""
        size = of_side.side.size
        if of_side.side.kind != "matrix" or not self._fresh[0, number]:
            return None, np.ones(size, np.float32)
        packed = self.eigens[of_side.eigen]
        return packed[: size * size].reshape(size, size), packed[size * size :]

    def updates(self, mean: Array, mine: Array, terms: Array) -> tuple[Array]:
        self._decompose(mine)
        self._fresh &= mine
        found = np.zeros(self.packing.update_size, np.float32)
        found[: self.packing.marks] = mine.ravel()
        if mine.all():
            found[self.packing.updates[0]] = self._preconditioned(mean, float(terms[0])).ravel()
        return (found,)

    def along_lw(self, mean: Array, updates: Array, terms: Array) -> tuple[Array, Array]:
        return self._clipped(mean, updates[self.packing.updates[0]], terms)

    def along_opt(self, mean: Array, terms: Array) -> tuple[Array, Array]:
        return self._clipped(mean, self._preconditioned(mean, float(terms[0])).ravel(), terms)

    def _clipped(self, mean: Array, update: Array, terms: Array) -> tuple[Array, Array]:
        if not self.factors[0]:  # Nothing was seen yet.
            return mean.copy(), np.ones(1)
        nu = factor_of(float(np.vdot(update.astype(np.float64), mean)), terms)
        return np.float32(nu) * update, np.array([nu])

    # ------------------------------------------------------------ what is handed on and saved

    def give(self) -> tuple[Array]:
        return (np.concatenate([self.factors, self._fresh.ravel(), self.eigens]).astype("f4"),)

    def take(self, given: Array) -> tuple[Array, ...]:
        ends = np.cumsum([self.factors.size, self._fresh.size])
        self.factors, fresh, self.eigens = (part.copy() for part in np.split(given, ends))
        self._fresh = fresh.astype(np.uint8).reshape(-1, 2)
        return ()

    def state(self) -> dict[str, Array]:
        return {"kfac": self.give()[0]}

    def restore(self, state: Mapping[str, Array]) -> None:
        if "kfac" in state and state["kfac"].size == self.give()[0].size:
            self.take(state["kfac"])
            if self._shares and not self._fresh.all():  # Of "lw": each replica has only its own.
                self._fresh[:] = 0


def factor_of(product: float, terms: Array) -> float:
    """nu. product: the sum of P.V over all layers. terms: gamma, kappa and the rate."""
    _, kappa, rate = terms.tolist()
    change = abs(rate * rate * product)
    return min(1.0, math.sqrt(kappa / change)) if kappa and change > 0 else 1.0


def decomposed(packed: Array, size: int) -> Array:
    """The eigenvectors and eigenvalues of a packed factor, float32[size (size + 1)]."""
    matrix = np.zeros((size, size))
    matrix[upper(size)] = packed
    values, vectors = np.linalg.eigh(matrix, UPLO="U")
    values[values < EIGENVALUE_MIN] = 0.0
    assert all_finite(values), "factors are finite"
    return np.concatenate([vectors.ravel(), values]).astype(np.float32)
