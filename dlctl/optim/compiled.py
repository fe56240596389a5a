"""Update rules in C where they were built (`dlctl/kernels/`), with numpy's results to the bit."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dlctl import kernels
from dlctl.optim.blocks import Block, Rule

_LARGEST = float(np.finfo(np.float32).max)
_ZERO = np.zeros(1, np.float32)


def rule(name: str, by_numpy: Rule, *constants: float) -> Rule:
    """The rule `name` of `kernels.c` with these constants; else `by_numpy`, which does the same."""
    step = kernels.step(name)
    # C has them as float32. numpy tells of one that is infinite there, and C does not.
    if step is None or not all(abs(constant) <= _LARGEST for constant in constants):
        return by_numpy

    def in_c(blocks: Iterable[Block]) -> None:
        for block in blocks:
            _, w, g, slots, w_next, slots_next = block
            # What has come in a message may begin at any byte: C must not read it there.
            if w.dtype != np.float32 or g.dtype != np.float32 or not g.flags.aligned:
                by_numpy([block])
            elif step(constants, w, g, w_next, slots, slots_next):
                # Whatever `np.errstate` says is done about it, as after an operation of numpy's.
                np.divide(_ZERO, _ZERO)

    return in_c
