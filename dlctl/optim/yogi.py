"""Yogi: Adam with an additive second moment. Zaheer et al., NeurIPS 2018, Algorithm 2.

    m  = beta1 * m + (1 - beta1) * g
    v -= (1 - beta2) * sign(v - g * g) * g * g
    w -= lr * m / (sqrt(v) + eps)

v moves by at most (1 - beta2) g^2, so that it forgets a large gradient slowly and rates do not grow
at once where gradients are sparse. As in the paper there is no bias correction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le

from dlctl.optim import compiled
from dlctl.optim.adam import Adam, AdamOptions
from dlctl.optim.blocks import Rule
from dlctl.util.numeric_limits import LearningRate
from dlctl.util.threads import scratch
from dlctl.wire.messages import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class YogiOptions(AdamOptions):
    lr: LearningRate = 0.01
    """Learning rate: about the size of a step. Changes live."""
    eps: Annotated[float, Ge(1e-12), Le(1)] = 1e-3
    """Added to the root of v; the paper's is far larger than Adam's."""
    initial_accumulator: Annotated[float, Ge(0), Le(1e6)] = 1e-6
    """v at the start. The paper takes the mean square of a gradient at the initial values."""


class Yogi(Adam):
    """Slots and lazy sparse pushes are Adam's, and so is `weight_decay`, which the paper has not.
    It counts nothing.
    """

    Options: ClassVar[type[Any]] = YogiOptions

    def __init__(self, options: YogiOptions) -> None:
        super().__init__(options)
        self.slots = {"mean": 0.0, "square": options.initial_accumulator}
        self.counters = {}

    def begin_update(self) -> Rule:
        rate, stays = self.lr, 1 - self.lr * self.weight_decay
        constants = rate, 1 - self.beta1, 1 - self.beta2, self.eps, stays
        return compiled.rule("yogi", partial(self._step, rate=rate, root_of_bias=1.0), *constants)

    def _mean_square(self, v: Array, g: Array, v_next: Array, temporary: Array) -> None:
        square = scratch(g.size, 1)
        np.multiply(g, g, out=square)
        np.subtract(v, square, out=temporary)
        np.sign(temporary, out=temporary)
        temporary *= square
        temporary *= 1 - self.beta2
        np.subtract(v, temporary, out=v_next)
