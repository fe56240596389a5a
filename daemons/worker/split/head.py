"""The head of split learning: its task's layers behind the cut, as the engine of its worker.

It computes what clients ask, and never sees x; with "u" no labels either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from daemons.worker.replica import TorchReplica
from daemons.worker.split.client import Options, check_parts, checked
from daemons.worker.split.tensors import all_received, described, sent
from daemons.worker.task.user_task import TaskError, calling
from dlctl.algorithms.engines import EnginePlace, MethodEngine, Operation
from dlctl.model.vector import to_host
from dlctl.wire.messages import Array


class HeadModel(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, z: Tensor) -> Tensor:
        return self.head(z)  # type: ignore[no-any-return]


class HeadParts:
    """The task of the head's worker."""

    def __init__(self, user: Any, options: Options, party: str) -> None:
        """party: its name. Raises TaskError for a task that lacks a part."""
        self._user, self.party = user, party
        needed = ["server_model", *(["loss"] if options.shape == "vanilla" else [])]
        check_parts(user, needed, party, f'the head of shape = "{options.shape}"')

    def model(self) -> nn.Module:
        with calling("task.server_model"):
            return HeadModel(checked(self._user.server_model(), "server_model"))

    def mean_loss(self, output: Tensor, y: Tensor) -> Tensor:
        with calling("task.loss"):
            value = self._user.loss(output, y)
        if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
            raise TaskError(
                f'task.loss of party "{self.party}" returned no loss',
                hint="loss(output, y) returns a mean over the batch, a 0-d tensor",
            )
        return value


class Head(MethodEngine):
    """The operations that `dlctl/algorithms/methods/split.py` requests."""

    def __init__(self, place: EnginePlace) -> None:
        self._replica: TorchReplica = place.replica
        parts = self._replica.task.user
        assert isinstance(parts, HeadParts)
        self._parts = parts
        self._cut = ""
        """Dtype and shape of a sample of z, of the first one."""

    def operations(self) -> Mapping[str, Operation]:
        return {
            "step": self.step,
            "forward": self.forward,
            "backward": self.backward,
            "predict": self.predict,
        }

    def step(self, *arrays: Array) -> tuple[Array, ...]:
        """z, y -> dL/dz and its shape, the loss, and the gradient of h: float32[d]."""
        z, y = (each.to(self._replica.device) for each in all_received(arrays))
        output = self._trained(z)
        value = self._parts.mean_loss(output, y)
        return self._answer(z, value, None)

    def forward(self, *arrays: Array) -> tuple[Array, ...]:
        """z -> h(z) and its shape. Nothing is kept: `backward` computes it again."""
        (z,) = (each.to(self._replica.device) for each in all_received(arrays))
        with torch.no_grad():
            return sent(self._trained(z))

    def backward(self, *arrays: Array) -> tuple[Array, ...]:
        """z, dL/da -> dL/dz and its shape, and the gradient of h."""
        z, slope = (each.to(self._replica.device) for each in all_received(arrays))
        output = self._trained(z)
        if output.shape != slope.shape:
            raise TaskError(
                f"a client sent a gradient of shape {list(slope.shape)} for an output of shape "
                f"{list(output.shape)}",
                hint="server_model must return the same shape for the same batch",
            )
        return self._answer(z, output, slope)

    def predict(self, *arrays: Array) -> tuple[Array, ...]:
        """z -> h(z) and its shape, in eval mode."""
        (z,) = (each.to(self._replica.device) for each in all_received(arrays))
        model = self._replica.model
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return sent(self._called(z))
        finally:
            model.train(was_training)

    def _trained(self, z: Tensor) -> Tensor:
        self._replica.forget_gradients()
        self._replica.modes.train()
        return self._called(z.requires_grad_())

    def _called(self, z: Tensor) -> Tensor:
        """h(z). Raises TaskError for a z that it does not take, or another one than before."""
        came = described(z)
        self._cut = self._cut or came
        if came != self._cut:
            raise TaskError(
                f"the clients' cut tensors differ: a sample of one is {self._cut}, of another "
                f"{came}",
                hint="client_model() of all clients must end in the same shape and dtype",
            )
        try:
            output: Any = self._replica.model(z)
        except (RuntimeError, ValueError, TypeError) as error:
            raise TaskError(
                f'server_model of party "{self._parts.party}" does not take the clients\' cut '
                f"tensor, {came} a sample: {error}",
                hint="make the input of server_model() that of client_model()'s output, and "
                "start again",
            ) from error
        if not isinstance(output, Tensor) or len(output) != len(z):
            raise TaskError(
                f'server_model of party "{self._parts.party}" returned no tensor with a row for '
                f"each of {len(z)} samples",
                hint="return the output of the whole batch",
            )
        return output

    def _answer(self, z: Tensor, value: Tensor, slope: Tensor | None) -> tuple[Array, ...]:
        with calling("the backward pass of server_model"):
            value.backward(slope)  # type: ignore[no-untyped-call]
        gradient = to_host(self._replica.gathered(self._replica.gradients())).copy()
        assert z.grad is not None
        losses = () if slope is not None else (np.array([float(value.detach())], np.float64),)
        return (*sent(z.grad), *losses, gradient)
