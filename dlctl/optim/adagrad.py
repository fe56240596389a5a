"""Adagrad: every element has its own, falling rate. Duchi, Hazan, Singer, JMLR 2011.

    G += g * g
    w -= lr * g / (sqrt(G) + eps)

G includes the current gradient and never decays. In Dean et al. 2012 (§4.1) it lies in the shards
and is never sent; updates of all replicas go into the one G in their order of arrival. Here g is
what was pushed: a sum of several gradients counts as one gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le

from dlctl.job.config import STRICT
from dlctl.job.settings import Setting
from dlctl.optim import compiled
from dlctl.optim.base import LEARNING_RATE
from dlctl.optim.blocks import Block, Rule
from dlctl.util.numeric_limits import LearningRate
from dlctl.util.threads import scratch
from dlctl.wire.messages import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class AdagradOptions:
    __pydantic_config__ = STRICT

    lr: LearningRate = 0.01
    """Learning rate, gamma in the paper. Changes live."""
    initial_accumulator: Annotated[float, Ge(0), Le(1e6)] = 0.0
    """G at the start. With 0 the first step of an element is lr whatever its gradient; 0.1 or 1
    tames the first steps."""
    eps: Annotated[float, Ge(1e-30), Le(1)] = 1e-10
    """Added to the root, so that an element without any gradient yet does not change."""


class Adagrad:
    """As torch.optim.Adagrad with lr_decay 0; slot "sum" is G.

    A sparse push changes only its own elements of G. There is no weight decay: G holds only
    gradients of the loss.
    """

    Options: ClassVar[type[Any]] = AdagradOptions
    live: ClassVar[Mapping[str, Setting]] = {"lr": LEARNING_RATE}

    def __init__(self, options: AdagradOptions) -> None:
        self.lr = options.lr
        self.eps = options.eps
        self.slots: Mapping[str, float] = {"sum": options.initial_accumulator}
        self.counters: Json = {}

    def begin_update(self) -> Rule:
        return compiled.rule("adagrad", self._step, self.lr, self.eps)

    def _step(self, blocks: Iterable[Block]) -> None:
        """One step of each element at its own rate."""
        for _, w, g, (G,), w_next, (G_next,) in blocks:
            step = scratch(g.size)
            np.multiply(g, g, out=step)
            np.add(G, step, out=G_next)
            np.sqrt(G_next, out=step)
            step += self.eps
            np.divide(g, step, out=step)
            step *= self.lr
            np.subtract(w, step, out=w_next)
