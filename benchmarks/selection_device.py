"""Selection on a GPU: 1 % of 1,000,000,000 float32 with the residual there, and the copies to the
host.

The figure is a push's work on the device: the gradient is added to the residual, the threshold of
the previous push (slightly too low, as in `selection.py`) finds about 1.04 k elements, they are cut
to k, and the rest remains. It alternates with one bare pass over the same two vectors: read both,
write the residual. Then all copies to the host during some pushes of `topk-sampled` are counted.
Sent entries must be copied; the gradient must not.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.figures import Figure, ratio, take_turns
from dlctl.compress.magnitudes import Magnitudes, Scratch, largest_of
from dlctl.compress.sampled import SampledTopK

ELEMENTS = 1_000_000_000
DENSITY = 0.01
ASKED = 2.0
COPIED_ASKED = 3.0
"""k values, their k positions, and without a threshold a sample of about k elements."""
BYTES_EACH = 24
"""Device memory per element: both vectors, magnitudes, flags, and torch's own buffers."""
PUSHES = 3
"""The first one samples its threshold, the others reuse one."""


def measure_devices(*, quick: bool) -> list[Figure]:
    """On the first GPU; without one, skipped figures."""
    if not torch.cuda.is_available():
        why = "needs a CUDA device"
        names = zip(names_of("cuda", ELEMENTS), (ASKED, COPIED_ASKED), strict=True)
        return [Figure("selection", name, "x", (), asked, skipped=why) for name, asked in names]
    free, _ = torch.cuda.mem_get_info()
    size = fitting(1_000_000 if quick else ELEMENTS, free)
    return measure_on("cuda", size, rounds=1 if quick else 5)


def names_of(device: str, size: int) -> tuple[str, str]:
    what = f"{device}, {DENSITY:.1%} of {size:,} elements"
    return f"{what} / read and write them", f"{what}: copied to the host / sent"


def fitting(size: int, free_bytes: int) -> int:
    """`size`, or a tenth, a hundredth ... of it: the largest that fits in memory."""
    while size > 1 and size * BYTES_EACH > free_bytes:
        size //= 10
    return size


def measure_on(device: str, size: int, rounds: int) -> list[Figure]:
    generator = torch.Generator(device).manual_seed(0)
    residual = torch.randn(size, device=device, generator=generator)
    # To add zeros takes as long, and every round finds the same elements.
    gradient = torch.zeros_like(residual)
    k = max(1, int(DENSITY * size))
    whole = synchronised(selecting(residual, gradient, k), device)
    bare = synchronised(lambda: torch.add(residual, gradient, out=residual), device)
    speed, copies = names_of(device, size)
    figure = ratio("selection", speed, *take_turns(rounds, whole, bare), ASKED)
    copied = tuple(elements / k for elements in copied_by_pushes(residual, gradient))
    return [figure, Figure("selection", copies, "x", copied, COPIED_ASKED)]


def selecting(residual: Any, gradient: Any, k: int) -> Callable[[], None]:
    """What a push takes from `residual` (float32 [n], normally distributed), then restored."""
    threshold = NormalDist().inv_cdf(1 - k / len(residual) / 2) * 0.995
    scratch = Scratch()

    def select() -> None:
        residual.add_(gradient)
        u = Magnitudes(residual, scratch)
        found = u.at_least(threshold)
        found = largest_of(found, min(k, len(found.where)))
        u.u[found.where] = 0
        u.u[found.where] = found.values  # so that the next round finds them again

    return select


def synchronised(work: Callable[[], object], device: str) -> Callable[[], None]:
    """The same, synchronised with the device."""

    def done() -> None:
        work()
        if device != "cpu":
            torch.cuda.synchronize()

    return done


def copied_by_pushes(residual: Any, gradient: Any) -> list[int]:
    """Elements copied to the host by each push; its gradient is drawn into `gradient` before."""
    compressor = SampledTopK(SampledTopK.Options(density=DENSITY, dense_below=0))
    copied = []
    for _ in range(PUSHES):
        residual.add_(gradient.normal_())
        with HostCopies() as copies:
            compressor.take(residual)
        copied.append(copies.elements)
    return copied


class HostCopies(TorchDispatchMode):
    """Counts elements that torch's operations in this thread copy from a device to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(is_elsewhere(leaf) for leaf in tree_leaves((args, kwargs))):
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.elements += sum(tensor.numel() for tensor in made if not is_elsewhere(tensor))
        return result


def is_elsewhere(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"
