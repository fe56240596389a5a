"""The `topk-sampled` compressor on 25,000,000 float32: against torch.topk, and against a memcpy.

The figures measure the selection with the threshold of the previous push: slightly too low, so that
about 1.04 k elements are found, cut to k, and removed from the residual. Only the last figure
includes adding the gradient to the residual before and packing the positions after: all of a
worker's work for a push before it is sent. One thread. For a GPU see `selection_device.py`.
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.figures import Figure, ratio, take_turns
from benchmarks.selection_device import measure_devices
from dlctl.compress.magnitudes import Magnitudes, Scratch, largest_of
from dlctl.compress.sampled import SampledTopK

ELEMENTS = 25_000_000
DENSITIES = (0.01, 0.001)
TOPK_ASKED, MEMCPY_ASKED = 0.0667, 10.0


def measure(*, quick: bool) -> list[Figure]:
    size, rounds = (250_000, 1) if quick else (ELEMENTS, 5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures = [
            figure
            for density in DENSITIES
            for figure in (*_measure(size, density, rounds), _whole(size, density, rounds))
        ]
    finally:
        torch.set_num_threads(threads)
    return figures + measure_devices(quick=quick)


def _measure(size: int, density: float, rounds: int) -> list[Figure]:
    x = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    u, tensor, k = x.copy(), torch.from_numpy(x), max(1, int(density * size))
    threshold = float(np.partition(np.abs(x), size - k)[size - k]) * 0.995
    scratch = Scratch()

    def select() -> None:
        found = Magnitudes(u, scratch).at_least(threshold)
        found = largest_of(found, k)
        u[found.where] = 0
        u[found.where] = found.values  # so that the next round finds them again

    def topk() -> object:
        return torch.topk(tensor.abs(), k, sorted=False)

    def memcpy() -> None:
        np.copyto(u, x)

    what = f"{density:.1%} of {size:,} elements"
    return [
        ratio("selection", f"{what} / torch.topk", *take_turns(rounds, select, topk), TOPK_ASKED),
        ratio("selection", f"{what} / memcpy", *take_turns(rounds, select, memcpy), MEMCPY_ASKED),
    ]


def _whole(size: int, density: float, rounds: int) -> Figure:
    """Adds a gradient to the residual and takes a push out of it; every push has the same values.

    Half of each value was in the residual before. The first round, which does not count, has no
    threshold yet.
    """
    x = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    gradient = x / 2
    residual, copy = np.empty_like(x), np.empty_like(x)
    compressor = SampledTopK(SampledTopK.Options(density=density))

    def take() -> None:
        np.add(residual, gradient, out=residual)
        compressor.take(residual)

    ours_s, bare_s = take_turns(
        rounds, take, lambda: np.copyto(copy, x), prepare=lambda: np.copyto(residual, gradient)
    )
    what = f"{density:.1%} of {size:,} elements, with the gradient and the positions / memcpy"
    return ratio("selection", what, ours_s, bare_s)
