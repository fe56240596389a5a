"""bfloat16 by hand: the upper half of a float32, rounded to nearest, ties to even; as uint16."""

from __future__ import annotations

from typing import Any

import numpy as np

from dlctl.wire.messages import Array

EXPONENT = 0x7F80


def encode(u: Array) -> Array:
    """uint16[n] of float32 or float64 [n]. Larger values become infinite, a NaN stays a NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = u.astype(np.float32).view(np.uint32)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    bits += 0x7FFF + ((bits >> 16) & 1)  # wraps for some NaN, which are corrected below
    rounded = (bits >> 16).astype("<u2")
    rounded[nan] = EXPONENT | 0x40
    return rounded


def decode(bits: Array) -> Array:
    """float32[n] of uint16[n], exactly."""
    return (bits.astype("<u4") << 16).view("<f4")


def bits_of(tensor: Any) -> Array:
    """uint16[n], on the host, of a torch tensor of bfloat16[n]."""
    int16 = tensor[:0].short().dtype
    bits: Array = tensor.view(int16).cpu().numpy().view("<u2")
    return bits


def all_finite(bits: Array) -> bool:
    return not ((bits & EXPONENT) == EXPONENT).any()
