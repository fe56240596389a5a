"""The optimiser inside a replica: torch's own, over the float32 values that are the model.

Its rate is told with every step (`schedule.py`); a group whose rate is another one keeps the ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from daemons.worker.task import calling
from dlctl import registry
from dlctl.config import Choice
from dlctl.errors import DlctlError
from dlctl.inner import NONE, SAVED_AS
from dlctl.messages import Array

_PYTHON = "#"
"""Behind the name of a state that is a number of Python's, and no tensor."""


class InnerOptimizer:
    """One or several of torch's optimisers that share out the tensors."""

    def __init__(self, choice: Choice, tensors: Sequence[Tensor]) -> None:
        """tensors: float32, the model's values. Raises DlctlError for options that the class does
        not take, TaskError for what somebody else's raises.
        """
        self.tensors = list(tensors)
        self._optimizers = _make(choice, self.tensors)
        lr = float(choice.options["lr"])
        self._scales = [
            [group["lr"] / lr if lr else 1.0 for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]

    def step(self, gradients: Sequence[Tensor | None], lr: float) -> None:
        """One step with this rate. gradients: of the tensors, in their order; None: that one stays
        as it is.
        """
        for tensor, gradient in zip(self.tensors, gradients, strict=True):
            tensor.grad = gradient
        for optimizer, scales in zip(self._optimizers, self._scales, strict=True):
            for group, scale in zip(optimizer.param_groups, scales, strict=True):
                group["lr"] = lr * scale
            optimizer.step()
        for tensor in self.tensors:
            tensor.grad = None

    def state(self) -> dict[str, Array]:
        """All that it keeps, under its names in a checkpoint: copies."""
        found: dict[str, Array] = {}
        for number, optimizer in enumerate(self._optimizers):
            for index, kept in optimizer.state_dict()["state"].items():
                for key, value in kept.items():
                    name = f"{SAVED_AS}{number}.{index}.{key}"
                    if isinstance(value, Tensor):
                        found[name] = value.detach().cpu().numpy().copy()
                    elif value is not None:
                        found[name + _PYTHON] = np.array(value)
        return found

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go on from what `state` was. Raises DlctlError if it is another optimiser's."""
        kept: list[dict[int, dict[str, Any]]] = [{} for _ in self._optimizers]
        for name, array in state.items():
            number, index, key = name.removeprefix(SAVED_AS).split(".", 2)
            is_number = key.endswith(_PYTHON)
            value = array.item() if is_number else torch.from_numpy(np.array(array))
            if int(number) >= len(kept):
                raise _of_another()
            kept[int(number)].setdefault(int(index), {})[key.removesuffix(_PYTHON)] = value
        for optimizer, of_it in zip(self._optimizers, kept, strict=True):
            saved = optimizer.state_dict() | {"state": of_it}
            if not self._fits(optimizer, of_it):
                raise _of_another()
            optimizer.load_state_dict(saved)

    def _fits(self, optimizer: torch.optim.Optimizer, state: dict[int, dict[str, Any]]) -> bool:
        """Whether what is kept for a parameter could be of it."""
        sizes = [t.numel() for group in optimizer.param_groups for t in group["params"]]
        return all(
            index < len(sizes)
            and max((v.numel() for v in kept.values() if isinstance(v, Tensor)), default=0)
            <= sizes[index]
            for index, kept in state.items()
        )


def _of_another() -> DlctlError:
    return DlctlError(
        "the checkpoint has the state of another inner optimiser",
        hint="start with the [inner] of before, or with --fresh",
    )


def make(choice: Choice, tensors: Sequence[Tensor]) -> InnerOptimizer | None:
    """None: the replicas of this job make no steps of their own."""
    return None if choice.name == NONE else InnerOptimizer(choice, tensors)


def _make(choice: Choice, tensors: list[Tensor]) -> list[torch.optim.Optimizer]:
    entry, options = registry.load("inner_optimizers", choice.name), dict(choice.options)
    if not entry.torch:
        with calling(f"making the inner optimiser {choice.name}"):
            return [registry.attribute(choice.name)(tensors, **options)]
    rest = options.pop("adamw", None)
    if rest is None:
        return [getattr(torch.optim, entry.torch)(tensors, **options)]
    matrices = [tensor for tensor in tensors if tensor.ndim == 2]
    others = [tensor for tensor in tensors if tensor.ndim != 2]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(getattr(torch.optim, entry.torch)(matrices, **options))
    if others:
        made.append(torch.optim.AdamW(others, **rest))
    return made
