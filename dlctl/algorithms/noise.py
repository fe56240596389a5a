"""The gradient noise scale, from the pushes at a barrier (McCandlish et al., "An Empirical Model of
Large-Batch Training", 2018, appendix A.1).

The square of a gradient's norm is larger, the fewer samples it is of: |G|^2 + S / B on average, S
being the trace of the samples' covariance. So the pushes of replicas, and their mean, yield both:

    |G|^2 = (B |g|^2 - b mean |g_i|^2) / (B - b)
    S     = (mean |g_i|^2 - |g|^2) / (1/b - 1/B)        g_i: of n_i samples; g: their mean

    1/b = mean 1/n_i, B = sum n_i;  noise scale = S / |G|^2, in samples

As long as B is far below it, a step with twice the samples is worth nearly two steps. Both are sums
over the elements, so those of all shards add up; each is a separate running mean.
"""

from __future__ import annotations

from collections.abc import Sequence

KEPT = 0.95
"""Decay of the running means at every measured step."""


class NoiseScale:
    """Running means of the two parts of the gradient noise scale that one shard measures."""

    def __init__(self) -> None:
        self._noise = self._signal = self._weight = 0.0

    def add(self, squares: float, mean_squared: float, samples: Sequence[int]) -> None:
        """One step. squares: the sum of |g_i|^2; mean_squared: |g|^2; samples: each n_i > 0."""
        if len(samples) < 2:
            return  # One gradient cannot be compared with the mean.
        small, large = squares / len(samples), mean_squared
        inverse, whole = sum(1 / n for n in samples) / len(samples), sum(samples)
        noise = (small - large) / (inverse - 1 / whole)
        signal = (whole * large - small / inverse) / (whole - 1 / inverse)
        self._noise += (1 - KEPT) * (noise - self._noise)
        self._signal += (1 - KEPT) * (signal - self._signal)
        self._weight += (1 - KEPT) * (1 - self._weight)

    def parts(self) -> tuple[float, float] | None:
        """This shard's part of (S, |G|^2); None: unknown."""
        if not self._weight:
            return None
        return self._noise / self._weight, self._signal / self._weight


def noise_scale(parts: Sequence[tuple[float, float]]) -> float | None:
    """The gradient noise scale in samples, from all shards' parts; None: too noisy to measure."""
    noise, signal = (sum(values) for values in zip(*parts, strict=True)) if parts else (0.0, 0.0)
    return noise / signal if noise > 0 and signal > 0 else None
