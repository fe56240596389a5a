"""The user's own optimiser in a run: its steps are counted and pulled, and it is stepped along the
mean of all workers' gradients.

What it needs is what torch's optimisers share: hooks around `step`, `state` and `param_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from daemons.attach.model_vector import ModelVector
from daemons.attach.optimizer_state import OptimizerState
from dlctl.algorithms.needs import Pull
from dlctl.errors import DlctlError
from dlctl.wire.messages import Array


class UserOptimizer:
    """optimizer: the user's, without wrappers.
    steps: that the user's script has made so far.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: ModelVector,
        schedulers: Sequence[Any] = (),
        scaler: Any = None,
    ) -> None:
        """schedulers, scaler: whatever has `state_dict` and `load_state_dict`. Raises DlctlError
        for an optimizer that does not belong to the model.
        """
        self.optimizer = without_wrappers(optimizer)
        self.steps = 0
        self._model = model
        self._saved = OptimizerState(self.optimizer, model, schedulers, scaler)
        self._pull: Pull | None = None
        self._aims: dict[int, Tensor] = {}
        """id of a parameter -> where it is pulled to, on its device."""
        self._is_counted = True
        if not getattr(getattr(type(self.optimizer), "step", None), "hooked", False):
            raise DlctlError(
                f"the optimizer {type(self.optimizer).__qualname__} has no hooks around its steps",
                hint="its __init__ has to call that of torch.optim.Optimizer",
            )
        self._check_parameters()
        self._first = self._before = self._numbers()
        self.optimizer.register_step_pre_hook(self._before_step)
        self.optimizer.register_step_post_hook(self._after_step)

    def _check_parameters(self) -> None:
        """Raises DlctlError."""
        unknown = [
            parameter
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if self._model.name_of(parameter) is None
        ]
        if unknown:
            raise DlctlError(
                f"{len(unknown)} tensors of the optimizer {type(self.optimizer).__qualname__} are "
                f"no parameters of the model; the first has the shape {[*unknown[0].shape]}",
                hint="make the optimizer of the parameters of the model that is attached",
            )

    # ------------------------------------------------------------ the script's steps

    def steps_since(self, mark: int) -> int:
        """Steps of the user's script since `steps` was `mark`."""
        return self.steps - mark

    @property
    def pull(self) -> Pull | None:
        """Added to the gradients of the script's steps."""
        return self._pull

    @pull.setter
    def pull(self, pull: Pull | None) -> None:
        self._pull, self._aims = pull, {}
        if pull is not None:
            pairs = zip(self._model.parameters, self._model.placed(pull.toward), strict=True)
            self._aims = {id(each): aim for each, aim in pairs}

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._before = self._numbers()
        if self._pull is None or not self._is_counted:
            return None
        # args: the optimizer itself, and perhaps a closure, which computes the gradients.
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._pulling(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._pulling(args[1]), *args[2:]), kwargs
        self._add_pull()
        return None

    def _pulling(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def pulled() -> Any:
            returned = closure()
            self._add_pull()
            return returned

        return pulled

    @torch.no_grad()
    def _add_pull(self) -> None:
        """Add strength * (value - toward); a tensor without a gradient has not moved."""
        assert self._pull is not None
        # Set while a GradScaler steps a fused optimiser, which unscales the gradients on its own.
        scale = getattr(self.optimizer, "grad_scale", None)
        for parameter in self._model.parameters:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            way = (parameter - self._aims[id(parameter)]).mul_(self._pull.strength)
            parameter.grad.add_(way if scale is None else way * scale)

    def _after_step(self, *_: Any) -> None:
        self.steps += self._is_counted
        for was, now in zip(self._before, self._numbers(), strict=True):
            self._saved.stepped |= {key for key, value in now.items() if was.get(key) != value}

    def _numbers(self) -> list[dict[str, Any]]:
        """The numbers among the options of each parameter group."""
        return [
            {key: value for key, value in group.items() if isinstance(value, bool | int | float)}
            for group in self.optimizer.param_groups
        ]

    # ------------------------------------------------------------ steps and state of the run's

    @torch.no_grad()
    def step_along(self, gradient: Array) -> None:
        """Make a step along float32[d], which is none of the script's. The gradients are None at
        its end.
        """
        values = self._model.placed(gradient)
        for parameter, view in zip(self._model.parameters, values, strict=True):
            mine, its = ((t.dtype, t.device, t.stride()) for t in (parameter, view))
            # Else of the parameter's strides: a fused kernel ignores them.
            parameter.grad = view if mine == its else torch.empty_like(parameter).copy_(view)
        self._is_counted = False
        try:
            self.optimizer.step()
        finally:
            self._is_counted = True
            for parameter in self._model.parameters:
                parameter.grad = None

    def forget(self) -> None:
        """Reset the state to that of a new optimiser. Its options remain, the rate among them."""
        self.optimizer.state.clear()
        for group, first in zip(self.optimizer.param_groups, self._first, strict=False):
            group.update({key: first[key] for key in self._saved.stepped & first.keys()})

    def state(self) -> dict[str, Array]:
        """The whole state, by its names in a checkpoint. On the CPU it is not copied: use it before
        the next step.
        """
        return self._saved.state()

    def restore(self, state: Mapping[str, Array]) -> None:
        """Load what `state` returned; the optimizer need not have made a step. Raises DlctlError,
        before anything is changed, if it is of another optimizer or of other parameters. state:
        if it is empty, a new optimizer's.
        """
        if state:
            self._saved.restore(state)
        else:
            self.forget()

    def packed(self) -> Array:
        """All numbers of the state as one vector, rounded to float32[n]. It is empty before the
        first step.
        """
        return self._saved.packed()

    def take_packed(self, packed: Array) -> None:
        """Continue with the state of another replica's optimizer. Raises DlctlError if that is of
        another model or kind.
        """
        if not packed.size:
            self.forget()
            return
        if self._saved.size() != packed.size:
            # Most optimizers create their state in their first step: make one, and undo it.
            with self._model.values_kept():
                self.step_along(np.zeros_like(self._model.vector))
        self._saved.take_packed(packed)


def without_wrappers(optimizer: Optimizer) -> Optimizer:
    """The user's own optimizer. accelerate's is a torch optimizer by its class only."""
    while "_optimizer_step_pre_hooks" not in vars(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    return optimizer
