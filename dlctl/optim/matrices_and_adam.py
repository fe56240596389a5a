"""Optimisers of matrices beside which AdamW steps everything else, element by element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from dlctl.job.config import STRICT
from dlctl.optim.adam import Adam, AdamOptions
from dlctl.optim.blocks import Rule
from dlctl.optim.matrices import UPDATES, Decay, MatrixOptimizer, WholeOptions
from dlctl.util.numeric_limits import LearningRate, WeightDecay


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixOptions(WholeOptions):
    __pydantic_config__ = STRICT

    lr: LearningRate = 0.001
    """Learning rate of matrices. Changes live."""
    beta1: Decay = 0.9
    """Decay of the mean gradient per update."""
    beta2: Decay = 0.999
    """Decay of the mean square per update."""
    eps: Annotated[float, Ge(1e-12), Le(1)] = 1e-8
    """Added to the root of the mean square."""
    weight_decay: WeightDecay = 0.01
    """w shrinks by lr times this at each update, which is at most 1."""
    elementwise: tuple[str, ...] = ()
    """Patterns of the names of matrices that AdamW steps instead, such as embeddings."""


class MatricesAndAdam(MatrixOptimizer):
    """Slots "mean" and a second one; what else a matrix needs is kept beside it."""

    Options: ClassVar[type[Any]] = MatrixOptions
    SQUARE: ClassVar[str] = "square"
    options: MatrixOptions

    def __init__(self, options: MatrixOptions) -> None:
        super().__init__(options, "mean", self.SQUARE)

    def adam_rate(self) -> float:
        """The rate of AdamW relative to that of matrices."""
        return 1.0

    def rest(self, lr_scale: float, weight_decay: float, number: int) -> Rule:
        o = self.options
        of = {"beta1": o.beta1, "beta2": o.beta2, "eps": o.eps, "weight_decay": weight_decay}
        adam = Adam(AdamOptions(lr=o.lr, **of))
        adam.lr = self.lr * lr_scale * self.adam_rate()
        adam.counters[UPDATES] = number - 1
        return adam.begin_update()
