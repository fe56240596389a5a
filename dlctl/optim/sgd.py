"""Plain gradient descent: w -= lr * g."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dlctl.job.config import STRICT
from dlctl.job.settings import Setting
from dlctl.optim import compiled
from dlctl.optim.base import LEARNING_RATE
from dlctl.optim.blocks import Block, Rule
from dlctl.util.numeric_limits import LearningRate, WeightDecay
from dlctl.util.threads import scratch
from dlctl.wire.messages import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class SGDOptions:
    __pydantic_config__ = STRICT

    lr: LearningRate = 0.01
    """Learning rate. Changes live."""
    weight_decay: WeightDecay = 0.0
    """This times w is added to the gradient; for a sparse push only at the elements it touches.
    lr times it is at most 1."""


class SGD:
    """As torch.optim.SGD without momentum; it keeps no state."""

    Options: ClassVar[type[Any]] = SGDOptions
    live: ClassVar[Mapping[str, Setting]] = {"lr": LEARNING_RATE}

    def __init__(self, options: SGDOptions) -> None:
        self.lr = options.lr
        self.weight_decay = options.weight_decay
        self.slots: Mapping[str, float] = {}
        self.counters: Json = {}

    def begin_update(self) -> Rule:
        return compiled.rule("sgd", self._step, self.lr, self.weight_decay)

    def _step(self, blocks: Iterable[Block]) -> None:
        """w -= lr * (g + weight_decay * w)."""
        for _, w, g, _, w_next, _ in blocks:
            step = scratch(g.size)
            if self.weight_decay:
                np.multiply(w, self.weight_decay, out=step)
                step += g
                step *= self.lr
            else:
                np.multiply(g, self.lr, out=step)
            np.subtract(w, step, out=w_next)
