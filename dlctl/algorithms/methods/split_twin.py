"""The head of split learning in numpy, for the simulator: `daemons/worker/split/head.py` is the one
in torch. The problem has the layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from dlctl.algorithms.engines import MethodEngine, Operation, TwinPlace
from dlctl.algorithms.methods.split import BACKWARD, FORWARD, PREDICT, STEP
from dlctl.wire.messages import Array

Tensor = tuple[Array, Array]
"""Its elements, and int64[n], its shape."""


class HeadLayers(Protocol):
    """The layers behind the cut, with parameters h, float32[d]."""

    def output(self, h: Array, z: Array) -> Array:
        """float32[n, ...], the output of all samples."""
        ...

    def loss(self, output: Array, y: Array) -> tuple[float, Array]:
        """The mean loss, and its gradient by the output."""
        ...

    def backward(self, h: Array, z: Array, slope: Array) -> tuple[Array, Array]:
        """The gradients by z and by h, float32[d], of a loss with this gradient by the output."""
        ...


def sent(values: Array) -> Tensor:
    kind = np.int64 if np.issubdtype(values.dtype, np.integer) else np.float32
    return np.asarray(values, kind).reshape(-1), np.array(values.shape, np.int64)


def received(elements: Array, shape: Array) -> Array:
    return elements.reshape(shape.tolist())


class HeadTwin(MethodEngine):
    def __init__(self, place: TwinPlace) -> None:
        self._layers: HeadLayers = place.problem
        self._h = place.parameters

    def operations(self) -> Mapping[str, Operation]:
        return {
            STEP: self.step, FORWARD: self.forward, BACKWARD: self.backward, PREDICT: self.forward,
        }  # fmt: skip

    def step(self, z: Array, z_shape: Array, y: Array, y_shape: Array) -> tuple[Array, ...]:
        of_z = received(z, z_shape)
        loss, slope = self._layers.loss(self._layers.output(self._h, of_z), received(y, y_shape))
        by_z, by_h = self._layers.backward(self._h, of_z, slope)
        return (*sent(by_z), np.array([loss]), by_h)

    def forward(self, z: Array, shape: Array) -> tuple[Array, ...]:
        return sent(self._layers.output(self._h, received(z, shape)))

    def backward(
        self, z: Array, z_shape: Array, slope: Array, slope_shape: Array
    ) -> tuple[Array, ...]:
        by_z, by_h = self._layers.backward(
            self._h, received(z, z_shape), received(slope, slope_shape)
        )
        return (*sent(by_z), by_h)
