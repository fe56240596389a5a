"""RMSprop: steps along a gradient over its typical size. Hinton, Coursera lecture 6e, 2012.

    v  = alpha * v + (1 - alpha) * g * g
    b  = momentum * b + g / (sqrt(v) + eps)
    w -= lr * b

The formula is torch's: eps is outside the root, and the rate outside the momentum. The centred
variant is left out: its variance becomes zero, or negative, where gradients repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le, Lt

from dlctl.job.config import STRICT
from dlctl.job.settings import Setting
from dlctl.optim import compiled
from dlctl.optim.base import LEARNING_RATE
from dlctl.optim.blocks import Block, Rule
from dlctl.util.numeric_limits import LearningRate
from dlctl.util.threads import scratch
from dlctl.wire.messages import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class RMSpropOptions:
    __pydantic_config__ = STRICT

    lr: LearningRate = 0.01
    """Learning rate: about the size of a step. Changes live."""
    alpha: Annotated[float, Ge(0), Lt(1)] = 0.99
    """How much of the mean square v stays at each update."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.0
    """How much of the previous sum of steps stays."""
    eps: Annotated[float, Ge(1e-12), Le(1)] = 1e-8
    """Added to the root of v."""


class RMSprop:
    """As torch.optim.RMSprop; slots "square" (v) and "momentum" (b).

    b is stored even if `momentum` is 0, so that a run may be resumed with another momentum. Sparse
    pushes are lazy: an element that is not pushed keeps its w, v and b.
    """

    Options: ClassVar[type[Any]] = RMSpropOptions
    live: ClassVar[Mapping[str, Setting]] = {"lr": LEARNING_RATE}

    def __init__(self, options: RMSpropOptions) -> None:
        self.lr = options.lr
        self.alpha = options.alpha
        self.momentum = options.momentum
        self.eps = options.eps
        self.slots: Mapping[str, float] = {"square": 0.0, "momentum": 0.0}
        self.counters: Json = {}

    def begin_update(self) -> Rule:
        constants = self.lr, self.alpha, 1 - self.alpha, self.momentum, self.eps
        return compiled.rule("rmsprop", self._step, *constants)

    def _step(self, blocks: Iterable[Block]) -> None:
        """One step along the decayed sum of gradients over their sizes."""
        for _, w, g, (v, b), w_next, (v_next, b_next) in blocks:
            step = scratch(g.size)
            np.multiply(g, g, out=step)
            step *= 1 - self.alpha
            np.multiply(v, self.alpha, out=v_next)
            v_next += step
            np.sqrt(v_next, out=step)
            step += self.eps
            np.divide(g, step, out=step)
            np.multiply(b, self.momentum, out=b_next)
            b_next += step
            np.multiply(b_next, self.lr, out=step)
            np.subtract(w, step, out=w_next)
