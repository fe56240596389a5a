"""The servers' optimiser of a job, placed on a shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dlctl.job.config import ParameterGroup
from dlctl.model import parameter_groups
from dlctl.model.flat import Layout
from dlctl.optim import grouped
from dlctl.optim.base import Optimizer
from dlctl.optim.matrices import MatrixOptimizer


def make(
    kind: type[Optimizer],
    options: Mapping[str, Any],
    groups: Sequence[ParameterGroup],
    layout: Layout,
    lo: int,
    hi: int,
) -> Optimizer:
    """The optimiser of the elements [lo, hi) of a model with these groups."""
    if issubclass(kind, MatrixOptimizer):
        optimizer = kind(kind.Options(**options))
        optimizer.place(layout, lo, hi, groups)
        return optimizer
    return grouped.make(kind, options, groups, parameter_groups.runs(groups, layout, lo, hi))
