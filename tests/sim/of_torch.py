"""Torch's own optimisers in simulated replicas."""

from __future__ import annotations

from collections.abc import Mapping

from dlctl.job import config
from dlctl.wire.messages import Array


class OfTorch:
    """Torch's own optimiser over the parameters of a simulated replica."""

    def __init__(self, choice: config.Choice, parameters: Array) -> None:
        import torch

        from daemons.worker.inner_optimizer import InnerOptimizer

        self.parameters = parameters
        self._tensor = torch.from_numpy
        self._inner = InnerOptimizer(choice, [torch.from_numpy(parameters)])

    def step(self, gradient: Array, lr: float) -> None:
        self._inner.step([self._tensor(gradient)], lr)

    def forget(self) -> None:
        self._inner.forget()

    def state(self) -> Mapping[str, Array]:
        return self._inner.state()

    def restore(self, state: Mapping[str, Array]) -> None:
        self._inner.restore(state)

    def packed(self) -> Array:
        return self._inner.packed()

    def take_packed(self, packed: Array) -> None:
        self._inner.take_packed(packed)
