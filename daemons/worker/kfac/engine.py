"""K-FAC's engine in torch: factors, eigenvectors and the preconditioned gradient.

Sizes and places are those of `kfac_shapes.Packing`; `kfac_twin.py` is the same in numpy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from daemons.worker.kfac.layers import Layer, described, found_in
from daemons.worker.kfac.recorder import Recorder
from dlctl.algorithms.engines import EnginePlace, MethodEngine, Operation
from dlctl.algorithms.methods.kfac_shapes import SIDES, OfSide, Packing
from dlctl.algorithms.methods.kfac_twin import EIGENVALUE_MIN, factor_of
from dlctl.util import values
from dlctl.wire.messages import Array

log = logging.getLogger("dlctl")
STATE = "kfac"
KEPT_MAX = 2048
"""The longest side of a matrix whose triangle's places are kept: 17 MB."""


class KfacEngine(MethodEngine):
    def __init__(self, place: EnginePlace) -> None:
        replica = place.replica
        self._device = replica.device
        self._shares = place.options.placement == "opt"
        found = found_in(replica.model, replica.layout, place.options)
        self.layers = found.layers
        self.packing = Packing(tuple(layer.sides for layer in found.layers))
        self._recorder = Recorder(found.layers)
        self.factors = torch.from_numpy(self.packing.initial()).to(self._device)
        self._seen = np.zeros(len(found.layers), np.bool_)
        """Layers of which a step had rows; the others are stepped along their gradients."""
        self._bases: dict[tuple[int, int], Tensor] = {}
        """(layer, side) -> its packed eigenvectors and eigenvalues; none: not decomposed yet."""
        self._fresh = np.zeros((len(found.layers), SIDES), np.uint8)
        """Sides whose bases are of the newest eigendecomposition."""
        self._along: Tensor | None = None
        """float32[d], the newest preconditioned gradient, in host memory that every step reuses."""
        size = values.size(self.packing.bytes_kept())
        for line in (*described(found), f"kfac keeps up to {size} beside the model"):
            log.info("%s", line)

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
        self._recorder.begin(samples, scale)

    def reweigh(self, factor: Tensor) -> None:
        self._recorder.reweigh(factor)

    def discard_step(self) -> None:
        self._recorder.drop()

    # ------------------------------------------------------------ factors

    def describe(self) -> tuple[Array, Array]:
        """What each eigendecomposition costs, and the size of what is handed on."""
        return self.packing.costs(), np.array([self._handed_on_size])

    def record(self) -> tuple[Array, ...]:
        """Record the next step."""
        self._recorder.record_next()
        return ()

    def given_factors(self) -> tuple[Array]:
        """Those of the recorded step; zeros if it has none."""
        found = torch.zeros(self.packing.factor_size, device=self._device)
        of_layers = zip(
            self._recorder.factors(), self.packing.sides, self.packing.seen, strict=True
        )
        for (a, g, is_seen), of_sides, at in of_layers:
            found[int(at)] = float(is_seen)
            for matrix, of_side in zip((a, g), of_sides, strict=True):
                if matrix is not None:
                    found[of_side.factor] = packed(matrix)
        return (_host(found),)

    def fold(self, mean: Array, numbers: Array) -> tuple[Array, ...]:
        """Average new factors into the old ones. numbers: damping, factor_decay, kl_clip."""
        decay = float(numbers[1])
        seen = mean[self.packing.seen]
        new = torch.from_numpy(mean).to(self._device)
        for part, (of_a, of_g) in zip(seen.tolist(), self.packing.sides, strict=True):
            if part:  # Replicas without a row of the layer have given no A; their G is zero.
                old_a, old_g = self.factors[of_a.factor], self.factors[of_g.factor]
                old_a.mul_(decay).add_(new[of_a.factor], alpha=(1 - decay) / part)
                old_g.mul_(decay).add_(new[of_g.factor], alpha=1 - decay)
        self._seen |= seen > 0
        return ()

    # ------------------------------------------------------------ eigenvectors

    def renew(self) -> tuple[Array, ...]:
        """The factors are to be decomposed again."""
        self._fresh[:] = 0
        return ()

    def _decompose(self, mine: Array) -> None:
        for layer, side in zip(*np.nonzero(mine & (1 - self._fresh)), strict=True):
            of_side = self.packing.sides[layer][side]
            if of_side.side.kind == "matrix":
                factor = unpacked(self.factors[of_side.factor], of_side.side.size)
                self._bases[int(layer), int(side)] = decomposed(factor)
            self._fresh[layer, side] = 1

    def given_eigens(self, mine: Array) -> tuple[Array]:
        """The marks and bases of the sides that this replica owns; zeros elsewhere."""
        self._decompose(mine)
        found = torch.zeros(self.packing.eigen_size, device=self._device)
        found[: self.packing.marks] = torch.from_numpy(mine.ravel()).to(found)
        for key, of_side in self._keyed():
            if mine[key] and key in self._bases:
                found[of_side.eigen] = self._bases[key]
        return (_host(found),)

    def take_eigens(self, given: Array) -> tuple[Array, ...]:
        """Those of all owners."""
        marks = given[: self.packing.marks].reshape(-1, SIDES) == 1
        for key, of_side in self._keyed():
            if marks[key]:
                self._fresh[key] = 1
                if of_side.side.kind == "matrix":
                    self._bases[key] = torch.tensor(given[of_side.eigen], device=self._device)
        return ()

    def _keyed(self) -> list[tuple[tuple[int, int], OfSide]]:
        return [
            ((layer, side), of_side)
            for layer, both in enumerate(self.packing.sides)
            for side, of_side in enumerate(both)
        ]

    # ------------------------------------------------------------ steps along the mean

    def along_opt(self, mean: Array, terms: Array) -> tuple[Array, Array]:
        """nu P, float32[d], and nu. terms: gamma, kappa and the rate."""
        vector = torch.from_numpy(mean).to(self._device)
        every = [
            self._preconditioned(number, layer.gradient(vector), float(terms[0]))
            for number, layer in enumerate(self.layers)
        ]
        return self._clipped(vector, every, terms)

    def updates(self, mean: Array, mine: Array, terms: Array) -> tuple[Array]:
        """The marks and P of the layers that this replica owns; zeros elsewhere."""
        self._decompose(mine)
        self._fresh &= mine
        self._bases = {key: basis for key, basis in self._bases.items() if mine[key]}
        vector = torch.from_numpy(mean).to(self._device)
        found = torch.zeros(self.packing.update_size, device=self._device)
        found[: self.packing.marks] = torch.from_numpy(mine.ravel()).to(found)
        for number, layer in enumerate(self.layers):
            if mine[number].all() and self._seen[number]:
                update = self._preconditioned(number, layer.gradient(vector), float(terms[0]))
                found[self.packing.updates[number]] = update.reshape(-1)
        return (_host(found),)

    def along_lw(self, mean: Array, updates: Array, terms: Array) -> tuple[Array, Array]:
        """As `along_opt`, with the P of all owners."""
        vector = torch.from_numpy(mean).to(self._device)
        given = torch.tensor(updates, device=self._device)
        every = [
            given[place].view(layer.sides.g.size, layer.sides.a.size)
            for place, layer in zip(self.packing.updates, self.layers, strict=True)
        ]
        return self._clipped(vector, every, terms)

    def _preconditioned(self, number: int, v: Tensor, damping: float) -> Tensor:
        """P[g, a]"""
        (qa, da), (qg, dg) = (self._basis(number, side) for side in range(SIDES))
        v = v if qg is None else qg.T @ v
        v = v if qa is None else v @ qa
        v = v / torch.outer(dg, da).add_(damping)
        v = v if qg is None else qg @ v
        return v if qa is None else v @ qa.T

    def _basis(self, number: int, side: int) -> tuple[Tensor | None, Tensor]:
        """(eigenvectors, eigenvalues); None: the identity."""
        of_side = self.packing.sides[number][side]
        size = of_side.side.size
        if of_side.side.kind == "diagonal":
            return None, self.factors[of_side.factor]
        basis = self._bases.get((number, side))
        if basis is None:
            return None, torch.ones(size, device=self._device)
        return basis[: size * size].view(size, size), basis[size * size :]

    def _clipped(self, mean: Tensor, every: list[Tensor], terms: Array) -> tuple[Array, Array]:
        """mean: the gradient, on the device. every: P of each layer."""
        of_seen: list[tuple[Layer, Tensor]] = [
            pair
            for pair, is_seen in zip(zip(self.layers, every, strict=True), self._seen, strict=True)
            if is_seen
        ]
        products = [torch.sum(layer.gradient(mean).double() * update) for layer, update in of_seen]
        nu = factor_of(float(torch.stack(products).sum()) if products else 0.0, terms)
        along = mean.clone()
        for layer, update in of_seen:
            layer.put(update * nu, along)
        if self._along is None:
            self._along = torch.empty(len(along), dtype=torch.float32, device="cpu")
        return self._along.copy_(along).numpy(), np.array([nu])

    # ------------------------------------------------------------ what is handed on and saved

    @property
    def _handed_on_size(self) -> int:
        return len(self.layers) + self.packing.factor_size + self.packing.eigen_size

    def give(self) -> tuple[Array]:
        """float32[n]: which layers were seen, the factors, which sides are decomposed, and their
        bases.
        """
        every = self._fresh.copy()
        for key, of_side in self._keyed():
            every[key] = key in self._bases or (of_side.side.kind != "matrix" and self._fresh[key])
        bases = torch.zeros(self.packing.eigen_size, device=self._device)
        bases[: self.packing.marks] = torch.from_numpy(every.ravel()).to(bases)
        for key, of_side in self._keyed():
            if key in self._bases:
                bases[of_side.eigen] = self._bases[key]
        return (np.concatenate([self._seen, _host(self.factors), _host(bases)], dtype=np.float32),)

    def take(self, given: Array) -> tuple[Array, ...]:
        """What `give` of another replica has returned."""
        ends = np.cumsum([len(self.layers), self.packing.factor_size])
        seen, factors, eigens = np.split(given, ends)
        self._seen = seen > 0
        self.factors.copy_(torch.tensor(factors))
        self._bases.clear()
        self.renew()
        return self.take_eigens(eigens)

    def state(self) -> dict[str, Array]:
        return {STATE: self.give()[0]}

    def restore(self, state: Mapping[str, Array]) -> None:
        if STATE in state and state[STATE].size == self._handed_on_size:
            self.take(state[STATE])
            if self._shares and not self._fresh.all():  # Of "lw": each replica has only its own.
                self._bases.clear()
                self.renew()
        else:  # Other layers than before, as with another `skip`.
            log.warning("kfac: the checkpoint has factors of other layers; they start over")


def _host(tensor: Tensor) -> Array:
    found: Array = tensor.cpu().numpy()
    return found


def packed(factor: Tensor) -> Tensor:
    """The upper triangle of a matrix, row by row; a diagonal as it is."""
    if factor.dim() == 1:
        return factor
    return factor.reshape(-1).index_select(0, _triangle(len(factor), factor.device))


def unpacked(packed: Tensor, size: int) -> Tensor:
    """The symmetric matrix of such a triangle."""
    matrix = torch.zeros(size * size, dtype=packed.dtype, device=packed.device)
    matrix = matrix.index_copy_(0, _triangle(size, packed.device), packed).view(size, size)
    return matrix + matrix.triu(1).T


def _triangle(size: int, device: torch.device) -> Tensor:
    """int64[size (size + 1) / 2]: the places of the upper triangle in a flat matrix. Finding them
    takes longer than the rest of packing, so those of small matrices are kept.
    """
    find = _kept_triangle if size <= KEPT_MAX else _new_triangle
    return find(size, device)


def _new_triangle(size: int, device: torch.device) -> Tensor:
    rows, columns = torch.triu_indices(size, size, device=device)
    places: Tensor = rows * size + columns
    return places


_kept_triangle = lru_cache(maxsize=16)(_new_triangle)


def decomposed(factor: Tensor) -> Tensor:
    """float32[n (n + 1)]: the eigenvectors, row by row, and the eigenvalues. In float64, because
    damping is far smaller than the largest of these.
    """
    try:
        found, vectors = torch.linalg.eigh(factor.double())
    except RuntimeError:  # A GPU's algorithm may not converge, or lack memory.
        found, vectors = torch.linalg.eigh(factor.double().cpu())
    found = torch.where(found < EIGENVALUE_MIN, 0.0, found)
    both = torch.cat([vectors.reshape(-1), found])
    return both.float().to(factor.device)
