"""Delayed Nesterov: momentum for pushes that arrive one by one. Liu et al., "Asynchronous Local-SGD
Training for Language Modeling", 2024 (arXiv 2401.09135), Alg. 3, with c = 0 unless it is given.

With momentum at every push, N replicas that push in turn would make N times the momentum of one
that pushes their mean. So momentum waits for N pushes; until then, each makes its own part
of a step at once. N = `every`, a push brings g:

    D += g
    every push but the N-th:   w -= lr (c momentum m + g / N)
    the N-th:                  m = momentum m + D / N;   D = 0
                               w -= lr ((1 - c N + c) momentum m + g / N)

- N pushes of the same g are one step of Nesterov's momentum along g, as torch.optim.SGD makes it.
- The N-th step is made of all elements, however sparse its push: others have pushed before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le, Lt

from dlctl.job.config import COUNT_MAX, STRICT
from dlctl.job.settings import Setting
from dlctl.optim import compiled
from dlctl.optim.base import LEARNING_RATE
from dlctl.optim.blocks import Block, Rule
from dlctl.optim.wrapping import keep
from dlctl.util.numeric_limits import LearningRate
from dlctl.util.threads import scratch
from dlctl.wire.messages import Json

PUSHES = "pushes"


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedNesterovOptions:
    __pydantic_config__ = STRICT

    lr: LearningRate = 0.7
    """Learning rate, of `every` pushes together. Changes live."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay of the previous sum at every `every`-th push."""
    every: Annotated[int, Ge(0), Le(COUNT_MAX)] = 0
    """Pushes from one step of the momentum to the next, N; 0: as many as the job has workers with
    "async-diloco", and 1 with any other method."""
    spread: Annotated[float, Ge(0), Le(1)] = 0.0
    """Fraction of the momentum applied by every other push, c: at most 1 / every."""


class DelayedNesterov:
    """Slots "momentum" and "arrived", the sum of the pushes since then; both 0 at first."""

    Options: ClassVar[type[Any]] = DelayedNesterovOptions
    live: ClassVar[Mapping[str, Setting]] = {"lr": LEARNING_RATE}

    def __init__(self, options: DelayedNesterovOptions) -> None:
        self.lr = options.lr
        self.momentum = options.momentum
        self.follows_workers = options.every == 0
        self._spread = options.spread
        self.set_every(max(1, options.every))
        self.slots: Mapping[str, float] = {"momentum": 0.0, "arrived": 0.0}
        self.counters: Json = {PUSHES: 0}

    def set_every(self, pushes: int) -> None:
        """Set the number of pushes for a step of the momentum."""
        self.every = pushes
        self.spread = min(self._spread, 1 / pushes)

    def sweeps_next(self) -> bool:
        return self.spread > 0 or self.counters[PUSHES] + 1 >= self.every

    def begin_update(self) -> Rule:
        pushes = self.counters[PUSHES] + 1
        self.counters[PUSHES] = 0 if pushes >= self.every else pushes
        if self.counters[PUSHES]:
            spread = self.spread * self.momentum
            return compiled.rule("nesterov_arrives", self._arrive, self.lr, self.every, spread)
        constants = self.lr, self.every, self._rest * self.momentum, self.momentum
        return compiled.rule("nesterov_steps", self._step, *constants)

    @property
    def _rest(self) -> float:
        """The part of the momentum that the N-th push applies."""
        return 1 - self.spread * (self.every - 1)

    def _arrive(self, blocks: Iterable[Block]) -> None:
        for _, w, g, (m, arrived), w_next, (m_next, arrived_next) in blocks:
            step = scratch(g.size)
            np.multiply(m, self.spread * self.momentum, out=step)
            self._descend(w, g, step, w_next)
            np.add(arrived, g, out=arrived_next)
            keep(m, m_next)

    def _step(self, blocks: Iterable[Block]) -> None:
        for _, w, g, (m, arrived), w_next, (m_next, arrived_next) in blocks:
            mean = scratch(g.size, 1)
            np.add(arrived, g, out=mean)
            mean /= self.every
            np.multiply(m, self.momentum, out=m_next)
            m_next += mean
            step = scratch(g.size)
            np.multiply(m_next, self._rest * self.momentum, out=step)
            self._descend(w, g, step, w_next)
            arrived_next[:] = 0

    def _descend(self, w: Any, g: Any, step: Any, w_next: Any) -> None:
        """w - lr (step + g / N); changes `step`."""
        part = scratch(g.size, 2)
        np.divide(g, self.every, out=part)
        step += part
        step *= self.lr
        np.subtract(w, step, out=w_next)
