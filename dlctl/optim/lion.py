"""Lion: steps of one size along the sign of a mean. Chen et al., NeurIPS 2023, Algorithm 2.

    c  = beta1 * m + (1 - beta1) * g
    w -= lr * (sign(c) + weight_decay * w)
    m  = beta2 * m + (1 - beta2) * g

It needs one vector where Adam needs two. The paper's advice: a rate 3 to 10 times smaller than
AdamW's, and a decay so much larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Lt

from dlctl.job.config import STRICT
from dlctl.job.settings import Setting
from dlctl.optim import compiled
from dlctl.optim.base import LEARNING_RATE
from dlctl.optim.blocks import Block, Rule
from dlctl.util.numeric_limits import LearningRate, WeightDecay
from dlctl.util.threads import scratch
from dlctl.wire.messages import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class LionOptions:
    __pydantic_config__ = STRICT

    lr: LearningRate = 0.0001
    """Learning rate: the size of a step. Changes live."""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Weight of the mean gradient m in the direction of a step; the rest is the new gradient."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.99
    """Decay of m per update."""
    weight_decay: WeightDecay = 0.0
    """w shrinks by lr times this at each update; a sparse push only shrinks its elements. lr times
    it is at most 1."""


class Lion:
    """Slot "mean" is m. A sparse push is lazy: an element that it does not touch keeps w and m."""

    Options: ClassVar[type[Any]] = LionOptions
    live: ClassVar[Mapping[str, Setting]] = {"lr": LEARNING_RATE}

    def __init__(self, options: LionOptions) -> None:
        self.lr = options.lr
        self.beta1 = options.beta1
        self.beta2 = options.beta2
        self.weight_decay = options.weight_decay
        self.slots: Mapping[str, float] = {"mean": 0.0}
        self.counters: Json = {}

    def begin_update(self) -> Rule:
        beta1, beta2, stays = self.beta1, self.beta2, 1 - self.lr * self.weight_decay
        constants = self.lr, beta1, 1 - beta1, beta2, 1 - beta2, stays
        return compiled.rule("lion", self._step, *constants)

    def _step(self, blocks: Iterable[Block]) -> None:
        """One step along the sign of the mean of m and g."""
        for _, w, g, (m,), w_next, (m_next,) in blocks:
            step, new = scratch(g.size), scratch(g.size, 1)
            np.multiply(m, self.beta1, out=step)
            np.multiply(g, 1 - self.beta1, out=new)
            step += new
            np.sign(step, out=step)
            step *= self.lr
            np.multiply(g, 1 - self.beta2, out=new)
            np.multiply(m, self.beta2, out=m_next)
            m_next += new
            if self.weight_decay:
                w = np.multiply(w, 1 - self.lr * self.weight_decay, out=w_next)
            np.subtract(w, step, out=w_next)
