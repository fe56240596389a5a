"""Momentum: steps along a decaying sum of gradients. Polyak 1964; Nesterov as in Sutskever 2013.

m = momentum * m + g
w -= lr * m                     (heavy ball)
w -= lr * (g + momentum * m)    (Nesterov)
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
from dlctl.wire.messages import Array, Json


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentumOptions:
    __pydantic_config__ = STRICT

    lr: LearningRate = 0.01
    """Learning rate. Changes live."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay of the previous sum; 0.9 makes steady steps up to 10 times longer."""
    nesterov: bool = False
    """Look ahead: step along the gradient plus the decayed new sum."""
    weight_decay: WeightDecay = 0.0
    """This times w is added to the gradient; for a sparse push only at the elements it touches.
    lr times it is at most 1."""


class Momentum:
    """As torch.optim.SGD with momentum and dampening 0; slot "momentum", 0 at first.

    A sparse push does not change the sums of other elements; they do not decay meanwhile.
    """

    Options: ClassVar[type[Any]] = MomentumOptions
    live: ClassVar[Mapping[str, Setting]] = {"lr": LEARNING_RATE}

    def __init__(self, options: MomentumOptions) -> None:
        self.lr = options.lr
        self.momentum = options.momentum
        self.nesterov = options.nesterov
        self.weight_decay = options.weight_decay
        self.slots: Mapping[str, float] = {"momentum": 0.0}
        self.counters: Json = {}

    def begin_update(self) -> Rule:
        constants = self.lr, self.weight_decay, self.momentum, self.nesterov
        return compiled.rule("momentum", self._step, *constants)

    def _step(self, blocks: Iterable[Block]) -> None:
        """One step along the decayed sum."""
        for _, w, pushed, (m,), w_next, (m_next,) in blocks:
            g = self._with_decay(w, pushed)
            np.multiply(m, self.momentum, out=m_next)
            m_next += g
            step = scratch(g.size)
            if self.nesterov:
                np.multiply(m_next, self.momentum, out=step)
                step += g
                step *= self.lr
            else:
                np.multiply(m_next, self.lr, out=step)
            np.subtract(w, step, out=w_next)

    def _with_decay(self, w: Array, g: Array) -> Array:
        if not self.weight_decay:
            return g
        decayed = scratch(g.size, 1)
        np.multiply(w, self.weight_decay, out=decayed)
        decayed += g
        return decayed
