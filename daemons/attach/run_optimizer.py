"""What `run.optimizer` returns, for methods that exchange gradients: its step hands the gradient to
the run, which steps the parameters.

It is an optimizer of torch's as any other for the script, its clipping, its GradScaler, its
learning rate schedulers and wrappers like accelerate's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from daemons.attach.model_vector import ModelVector
from daemons.attach.user_optimizer import without_wrappers
from dlctl.errors import DlctlError
from dlctl.wire.messages import Array


class RunOptimizer(Optimizer):
    """optimizer: the user's own, if the run makes steps with it in each replica. Its parameter
    groups and state are those of this one, so that a scheduler of either changes its rates.
    """

    def __init__(
        self, model: ModelVector, optimizer: Optimizer | None = None, *, lr: float = 1.0
    ) -> None:
        """lr: the run's rate, which the groups begin with; positive. Raises DlctlError if the
        user's optimizer leaves a trained parameter out.
        """
        self._user = None if optimizer is None else without_wrappers(optimizer)
        self._model, self._lr = model, lr
        self._room: Array | None = None
        self._pending: tuple[Array, float] | None = None
        super().__init__(model.parameters, {"lr": lr})
        self._share()
        stepped = {id(each) for group in self.param_groups for each in group["params"]}
        for parameter in model.parameters:
            if id(parameter) not in stepped:
                raise DlctlError(
                    f'parameter "{model.name_of(parameter)}" is trained (requires_grad=True), and '
                    "is not in the optimizer",
                    hint="give it to the optimizer, or call requires_grad_(False) on it before "
                    "dlctl.attach",
                )

    def _share(self) -> None:
        """Loading a state into the user's optimizer replaces its groups."""
        if self._user is not None:
            self.param_groups, self.state = self._user.param_groups, self._user.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Copy the gradients; `take` returns them. closure: computes them, and is called once.
        Raises DlctlError if there are none, or those of the step before were not taken.
        """
        self._share()
        returned = None
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
        if self._pending is not None:
            raise DlctlError(
                "optimizer.step() was called twice without run.step() between them",
                hint="call run.step() after each optimizer.step(); to sum several batches, call "
                "backward() for each of them before one optimizer.step()",
            )
        if not self._model.has_gradient():
            if closure is not None:  # It has left this batch out.
                return returned
            raise DlctlError(
                "optimizer.step() was called, and no parameter has a gradient",
                hint="call loss.backward() before it, and zero_grad() only behind it",
            )
        if self._room is None:
            self._room = self._model.room()
        self._pending = self._room, self._model.gather_gradient(self._room)
        return returned

    def take(self) -> tuple[Array, float] | None:
        """The gradient of the last step and its norm, which may not be finite; None: there was no
        step since it was taken, or a GradScaler has skipped it. float32[d], valid until the next
        step.
        """
        pending, self._pending = self._pending, None
        return pending

    @property
    def rate_factor(self) -> float:
        """The rate that a scheduler or the script has set, relative to the run's. 1 with the user's
        own optimizer, which has its rates itself. Raises DlctlError if it is not one number.
        """
        if self._user is not None:
            return 1.0
        factors = {float(group["lr"]) / self._lr for group in self.param_groups}
        factor = factors.pop()
        if factors or not 0 <= factor < math.inf:
            rates = ", ".join(f"{float(group['lr']):g}" for group in self.param_groups)
            raise DlctlError(
                f"the rates of run.optimizer(model) are {rates}, and the run's is {self._lr:g}: "
                "the servers step all parameters with one rate",
                hint="set one rate, 0 or more, in all groups; other ones for some parameters are "
                "lr_scale in [[parameters]] of the job file",
            )
        return factor

    def state_dict(self) -> dict[str, Any]:
        self._share()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """With the user's own optimizer, into that."""
        if self._user is None:
            super().load_state_dict(state_dict)
        else:
            self._user.load_state_dict(state_dict)
            self._share()
