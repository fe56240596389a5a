"""PowerSGD: gradients as products of two narrow matrices, which all replicas sum. Vogels et al.,
"PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019,
algorithms 1 and 2; as implemented by torch's hook of that name.

For every matrix M[n, m] of a gradient, with the error e of the step before (replica i):

    M_i += e_i
    P = orthogonal(mean_i M_i Q)        [n, r], the first sum, with all that is no matrix, as it is
    Q = mean_i M_i^T P                  [m, r], the second sum; the next step begins with it
    M = P Q^T                           the same for all replicas
    e_i = M_i - P P^T M_i

A matrix is a parameter's gradient, the first dimension by all others. One that would not become
`RATE_MIN` times smaller is summed uncompressed, as are vectors and scalars.

- torch keeps e_i = M_i - M. Their mean is the same, and so is every step. But each e_i then also
  accumulates by how much the replica's gradients differ from the mean, and grows without bound. If
  a replica dies, the errors of the others no longer cancel, and the next steps diverge.
- torch keeps an error of uncompressed gradients, too, which sums to zero over the replicas and
  changes nothing: here there is none.
- Where replicas have different numbers of samples, the means are by samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from dlctl.model.flat import TRAINED, Layout
from dlctl.model.vector import all_finite
from dlctl.wire.messages import Array

RATE_MIN = 2.0
"""torch's `min_compression_rate`."""


class PowerSgd:
    """One replica's side. Its state does not change between `first` and `commit`, so that a sum may
    be repeated, or be without this replica."""

    def __init__(self, layout: Layout, rank: int, seed: int = 0) -> None:
        """rank: r. seed: of Q, the same for all replicas."""
        self.size = layout.size(TRAINED)
        self.error = np.zeros(self.size, np.float32)
        """The error: all that is not in the sums so far, float32[d]."""
        self._matrices, plain = [], []
        for entry, lo, hi in layout.slices(TRAINED):
            rows = entry.shape[0] if entry.shape else 1
            columns, r = (hi - lo) // max(1, rows), min(rank, rows)
            r = min(r, columns)
            if len(entry.shape) > 1 and (rows + columns) * rank * RATE_MIN < hi - lo:
                self._matrices.append((lo, hi, rows, columns, r))
            else:
                plain.append(np.arange(lo, hi))
        self._plain = np.concatenate([np.zeros(0, np.int64), *plain])
        """Indices of the elements that are summed uncompressed."""
        rng = np.random.default_rng(seed)
        drawn = [rng.standard_normal(columns * r) for _, _, _, columns, r in self._matrices]
        self.q = np.concatenate([np.zeros(0), *drawn]).astype(np.float32)
        """The narrow matrices Q of all tensors, concatenated."""
        self._p: list[Array] = []
        self._own = self._own_q = self._plain_mean = np.zeros(0, np.float32)

    @property
    def sizes(self) -> tuple[int, int]:
        """Elements of the first and the second sum."""
        first = sum(rows * r for _, _, rows, _, r in self._matrices)
        return self._plain.size + first, self.q.size

    def first(self, gradient: Array) -> Array:
        """float32[d] -> the input of the first sum."""
        self._own = gradient + self.error
        parts = [self._own[self._plain]]
        for matrix, q in zip(self._matrices_of(self._own), self._qs(self.q), strict=True):
            parts.append((matrix @ _orthogonal(q)).ravel())
        return np.concatenate(parts)

    def second(self, mean: Array, *, takes_part: bool = True) -> Array:
        """The result of the first sum -> the input of the second. takes_part: `first` was called
        for this step; otherwise zeros, for a replica without a gradient.
        """
        self._plain_mean, self._p, at = mean[: self._plain.size], [], self._plain.size
        for _, _, rows, _, r in self._matrices:
            self._p.append(_orthogonal(mean[at : at + rows * r].reshape(rows, r)))
            at += rows * r
        if not takes_part:
            return np.zeros_like(self.q)
        matrices = self._matrices_of(self._own)
        parts = [(matrix.T @ p).ravel() for matrix, p in zip(matrices, self._p, strict=True)]
        self._own_q = np.concatenate([np.zeros(0, np.float32), *parts])
        return self._own_q

    def commit(self, mean: Array, *, is_counted: bool) -> Array:
        """The result of the second sum -> float32[d], the mean gradient. is_counted: this replica's
        own gradient is in both.
        """
        found = self._products(mean)
        if not all_finite(found):
            return found  # No replica steps along it, and it must not change the state.
        self.q = mean
        if is_counted:
            self.error = self._own - self._products(self._own_q)
            self.error[self._plain] = 0.0
        return found

    def _products(self, q: Array) -> Array:
        """P Q^T of every matrix, and what is summed uncompressed: float32[d]."""
        found = np.empty(self.size, np.float32)
        found[self._plain] = self._plain_mean
        for (lo, hi, *_), p, of_matrix in zip(self._matrices, self._p, self._qs(q), strict=True):
            found[lo:hi] = (p @ of_matrix.T).ravel()
        return found

    def _matrices_of(self, vector: Array) -> Iterator[Array]:
        for lo, hi, rows, columns, _ in self._matrices:
            yield vector[lo:hi].reshape(rows, columns)

    def _qs(self, q: Array) -> Iterator[Array]:
        at = 0
        for _, _, _, columns, r in self._matrices:
            yield q[at : at + columns * r].reshape(columns, r)
            at += columns * r


def _orthogonal(matrix: Array) -> Array:
    """An orthonormal basis of its columns: float32[n, r]."""
    if matrix.shape[1] == 1:
        norm = math.sqrt(float(np.vdot(matrix, matrix)))
        return matrix / np.float32(norm) if norm > 0 else matrix
    return np.linalg.qr(matrix)[0]
