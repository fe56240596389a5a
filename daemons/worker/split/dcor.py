"""Distance correlation of two samples, by which NoPeek measures what z tells about x. Szekely,
Rizzo and Bakirov, "Measuring and testing dependence by correlation of distances", 2007; the
unbiased estimate: Szekely and Rizzo, "Partial distance correlation with methods for
dissimilarities", 2014.

    D_ij = |x_i - x_j|,  A = D - row means - column means + mean      (B likewise, of z)
    dCor(x, z) = sqrt(mean(A B) / sqrt(mean(A A) mean(B B)))

That is biased: of independent x and z in many dimensions it is near 1. It has a gradient, so it is
what is trained with. What is reported is `u_dcor2`, of the U-centred matrices, whose mean is 0 for
independent samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlctl.algorithms.methods.split import SAMPLES_MIN

TINY = 1e-12
"""Beside a product of two variances: a constant z has none."""


def check(x: Tensor, z: Tensor) -> None:
    """Raises ValueError unless these are as many samples, at least `SAMPLES_MIN`."""
    if len(x) != len(z):
        raise ValueError(f"{len(x)} samples of x and {len(z)} of z")
    if len(x) < SAMPLES_MIN:
        raise ValueError(
            f"a distance correlation of {len(x)} samples: it needs {SAMPLES_MIN} or more"
        )


def distances(x: Tensor) -> Tensor:
    """[n, n]: Euclidean distances of the flattened samples. Its gradient is 0 where a distance is.

    Not by a product of matrices: near samples would cancel.
    """
    flat = x.reshape(len(x), -1)
    return torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")


def centred(d: Tensor) -> Tensor:
    return d - d.mean(0, keepdim=True) - d.mean(1, keepdim=True) + d.mean()


def u_centred(d: Tensor) -> Tensor:
    """U_ij = d_ij - sum_i/(n-2) - sum_j/(n-2) + sum/((n-1)(n-2)), and 0 on the diagonal."""
    n = len(d)
    rows = d.sum(1, keepdim=True) / (n - 2)
    u = d - rows - rows.T + d.sum() / ((n - 1) * (n - 2))
    return u - torch.diag(torch.diagonal(u))


def dcor(x: Tensor, z: Tensor) -> Tensor:
    """The biased distance correlation, 0-d, from 0 to 1, with a finite gradient everywhere. Raises
    ValueError as `check`.
    """
    check(x, z)
    a, b = centred(distances(x)), centred(distances(z))
    scale = torch.sqrt((a * a).mean() * (b * b).mean() + TINY**2)
    # Of a square root at 0 the slope is infinite: below `TINY` it is 0 here.
    square = (a * b).mean().clamp(min=0) / scale.clamp(min=TINY)
    return torch.where(square > TINY, torch.sqrt(square.clamp(min=TINY)), square * 0)


def u_dcor2(x: Tensor, z: Tensor) -> Tensor:
    """The unbiased estimate of its square, 0-d, from -1 to 1; 0 if x or z is constant. Raises
    ValueError as `check`.
    """
    check(x, z)
    a, b = u_centred(distances(x)), u_centred(distances(z))
    return u_correlation(a, b)


def u_correlation(a: Tensor, b: Tensor) -> Tensor:
    """The correlation of two U-centred matrices: the factor 1/(n (n - 3)) of the sums cancels."""
    scale = torch.sqrt((a * a).sum() * (b * b).sum())
    return torch.where(scale > 0, (a * b).sum() / scale.clamp(min=torch.finfo(a.dtype).tiny), 0.0)


def p_value(x: Tensor, z: Tensor, permutations: int, generator: torch.Generator) -> float:
    """The fraction of permutations of z whose u_dcor2 is at least that of the samples as they are,
    these included: small if x and z depend on each other. Raises ValueError as `check`.
    """
    check(x, z)
    a, b = u_centred(distances(x)), u_centred(distances(z))
    found = float(u_correlation(a, b))
    above = 1
    for _ in range(permutations):
        order = torch.randperm(len(z), generator=generator)
        above += float(u_correlation(a, b[order][:, order])) >= found
    return above / (permutations + 1)
