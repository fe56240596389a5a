"""The engine of toy-engine: every rank has its range of v, and all know the whole way."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from dlctl.algorithms.engines import EnginePlace, MethodEngine, Operation
from dlctl.model.flat import slice_bounds
from dlctl.wire.messages import Array
from dlctl_toys.engine import DECAY, EPS, RANKS_MAX


class Curvature(MethodEngine):
    def __init__(self, place: EnginePlace) -> None:
        size = len(place.replica.parameters)
        self.rank, self.group = place.rank, place.group
        self.own = slice(*slice_bounds(size, place.ranks, place.rank))
        self.v = torch.zeros(size)
        """Zeros outside of its own range."""
        self.steps = torch.zeros(RANKS_MAX)
        """Of this rank, in its place."""

    def operations(self) -> Mapping[str, Operation]:
        return {"way": self.way}

    def way(self, gradient: Array) -> tuple[Array]:
        g, v = torch.from_numpy(gradient)[self.own], self.v[self.own]
        v.mul_(float(DECAY)).add_((1 - float(DECAY)) * g**2)
        self.steps[self.rank] += 1
        way = torch.zeros(len(self.v))
        way[self.own] = g / (v.sqrt() + float(EPS))
        return (self._sum(way),)

    def state(self) -> dict[str, Array]:
        return {"v": self._sum(self.v), "steps": self._sum(self.steps)}

    def restore(self, state: Mapping[str, Array]) -> None:
        self.v[self.own] = torch.tensor(state["v"])[self.own]
        self.steps[self.rank] = float(state["steps"][self.rank])

    def _sum(self, vector: torch.Tensor) -> Array:
        summed = vector.clone()
        if self.group is not None:
            dist.all_reduce(summed, group=self.group)
        return summed.numpy()
