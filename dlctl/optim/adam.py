"""Adam: steps along a mean gradient over its typical size. Kingma and Ba, ICLR 2015.

    m += (1 - beta1) * (g - m)
    v  = beta2 * v + (1 - beta2) * g * g
    w -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

With `weight_decay` it is AdamW (Loshchilov and Hutter, ICLR 2019): w shrinks by lr * weight_decay
before each step, and the decay enters neither m nor v. The two names differ in its default alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le, Lt

from dlctl.job.config import STRICT
from dlctl.job.settings import Setting
from dlctl.optim import compiled
from dlctl.optim.base import LEARNING_RATE
from dlctl.optim.blocks import Block, Rule
from dlctl.util.numeric_limits import LearningRate, WeightDecay
from dlctl.util.threads import scratch
from dlctl.wire.messages import Array, Json


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamOptions:
    __pydantic_config__ = STRICT

    lr: LearningRate = 0.001
    """Learning rate: about the size of a step. Changes live."""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay of the mean gradient m per update."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.999
    """Decay of the mean square v per update."""
    eps: Annotated[float, Ge(1e-12), Le(1)] = 1e-8
    """Added to the root of v."""
    weight_decay: WeightDecay = 0.0
    """w shrinks by lr times this at each update; a sparse push only shrinks its elements. lr times
    it is at most 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWOptions(AdamOptions):
    weight_decay: WeightDecay = 0.01
    """w shrinks by lr times this at each update; a sparse push only shrinks its elements. lr times
    it is at most 1."""


class Adam:
    """As torch.optim.Adam, or AdamW with `weight_decay`; slots "mean" (m) and "square" (v).

    t, counter "updates", counts the updates of the shard. Sparse pushes are lazy, as in
    torch.optim.SparseAdam: an element that is not pushed keeps its w, m and v, while t increases.
    """

    Options: ClassVar[type[Any]] = AdamOptions
    live: ClassVar[Mapping[str, Setting]] = {"lr": LEARNING_RATE}

    def __init__(self, options: AdamOptions) -> None:
        self.lr = options.lr
        self.beta1 = options.beta1
        self.beta2 = options.beta2
        self.eps = options.eps
        self.weight_decay = options.weight_decay
        self.slots: Mapping[str, float] = {"mean": 0.0, "square": 0.0}
        self.counters: Json = {"updates": 0}

    def begin_update(self) -> Rule:
        """Counts in `counters["updates"]` even if the push is empty."""
        self.counters["updates"] += 1
        t = self.counters["updates"]
        rate = self.lr / (1 - self.beta1**t)
        root_of_bias = math.sqrt(1 - self.beta2**t)
        beta1, beta2, stays = self.beta1, self.beta2, 1 - self.lr * self.weight_decay
        constants = rate, 1 - beta1, beta2, 1 - beta2, root_of_bias, self.eps, stays
        by_numpy = partial(self._step, rate=rate, root_of_bias=root_of_bias)
        return compiled.rule("adam", by_numpy, *constants)

    def _step(self, blocks: Iterable[Block], rate: float, root_of_bias: float) -> None:
        for _, w, g, (m, v), w_next, (m_next, v_next) in blocks:
            step = scratch(g.size)
            self._mean(m, g, m_next, step)
            self._mean_square(v, g, v_next, step)
            np.sqrt(v_next, out=step)
            step /= root_of_bias
            step += self.eps
            np.divide(m_next, step, out=step)
            step *= rate
            if self.weight_decay:
                w = np.multiply(w, 1 - self.lr * self.weight_decay, out=w_next)
            np.subtract(w, step, out=w_next)

    def _mean(self, m: Array, g: Array, m_next: Array, temporary: Array) -> None:
        np.subtract(g, m, out=temporary)
        temporary *= 1 - self.beta1
        np.add(m, temporary, out=m_next)

    def _mean_square(self, v: Array, g: Array, v_next: Array, temporary: Array) -> None:
        np.multiply(g, g, out=temporary)
        temporary *= 1 - self.beta2
        np.multiply(v, self.beta2, out=v_next)
        v_next += temporary


class AdamW(Adam):
    """As torch.optim.AdamW, with its default of `weight_decay`."""

    Options: ClassVar[type[Any]] = AdamWOptions
