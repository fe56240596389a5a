"""Detects a task that changes its model after `model()` has returned it.

A run has the tensors that existed then: servers step the trained ones, buffers are averaged, frozen
parameters are assumed to be the same everywhere. Other changes, in a forward pass or between two,
would affect one worker only, and be missing or stale in what is saved. So such a change fails the
run, with the name of the first changed tensor.

A check costs some milliseconds for hundreds of tensors. It runs after 1, 2, 4, 8 ... steps and
every `LOOK_S`; values are compared by samples.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from daemons.worker.task.model_tensors import describe, kind
from daemons.worker.task.user_task import Task, TaskError
from dlctl.model.flat import CONSTANT, TRAINED

SAMPLE = 256
"""Elements of a tensor, evenly spread, that are compared."""
LOOK_S = 10.0
"""Interval between checks."""
_MADE = "is different on every worker, is not trained, and is missing in what is saved"
_AS_BUFFER = (
    "make it a buffer (register_buffer): the workers' buffers are averaged, evaluated and exported"
)


class ModelChanges:
    """Created when the model is bound to its vector. Call `begin` before a batch's loss, `end`
    after its backward pass, before the gradients are dropped. All but `begin` raise TaskError.
    """

    def __init__(self, task: Task, model: nn.Module) -> None:
        self._task = task
        self._model = model
        self._tensors = tensors_of(model)
        self._frozen = {k: p for k, p in self._tensors.items() if kind(p) == CONSTANT}
        self._trained = {
            key: parameter
            for key, parameter in self._tensors.items()
            if kind(parameter) == TRAINED and parameter.dtype is torch.float32
        }
        self._steps, self._look_at = 0, 0.0
        self._before: dict[str, bytes] | None = None
        """Samples of the trained parameters, if this step is checked."""
        self.record()

    def record(self) -> None:
        """Take the current frozen parameters as the reference, after they were loaded."""
        self._values = _samples(self._frozen)

    def others_step(self) -> None:
        """Do not check the trained parameters: other processes step them at any time."""
        self._trained = {}

    def begin(self) -> None:
        self._steps += 1
        is_due = not self._steps & (self._steps - 1) or time.monotonic() >= self._look_at
        self._before = _samples(self._trained) if is_due else None

    def end(self) -> None:
        if self._before is None:
            return
        # A task may clamp weights that have gradients: the next fetch overwrites them.
        for key, was in self._before.items():
            parameter = self._trained[key]
            is_left = parameter.grad is None and parameter.requires_grad
            if is_left and was != _some(parameter):
                raise self._error(
                    f'the task changes parameter "{key}", which has no gradient: the servers do '
                    "not get the change, and evaluate and save its initial value",
                    _AS_BUFFER,
                )
        self.check()
        self._look_at = time.monotonic() + LOOK_S

    def check(self) -> None:
        """Raises TaskError for a tensor that was added, removed or replaced, and for a frozen one
        that was trained or changed.
        """
        now = tensors_of(self._model)
        for key, tensor in now.items():
            was = self._tensors.get(key)
            if was is None or (was is not tensor and isinstance(was, nn.Parameter)):
                how = "made" if was is None else "replaced"
                raise self._error(
                    f'{describe(tensor)} "{key}" was {how} after model() had returned: it {_MADE}',
                    "make it in model(), or let model() run one batch before it returns the model, "
                    'and change its values in place ("copy_"); a buffer that is not to be saved, '
                    "with persistent=False",
                )
        for key in sorted(self._tensors.keys() - now.keys()):
            what = describe(self._tensors[key])
            raise self._error(
                f'{what} "{key}" was removed after model() had returned, and would still be saved',
                "remove it in model()",
            )
        for key, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise self._error(
                    f'parameter "{key}" was frozen, and has been trained (requires_grad=True): the '
                    "servers still treat it as frozen",
                    "set requires_grad in model(); to change it, stop and start a new run from the "
                    "exported model",
                )
            if self._values[key] != _some(parameter):
                raise self._error(
                    f'the task changes parameter "{key}", which is frozen (requires_grad=False): '
                    "the values of the workers differ then, and none of them are saved",
                    _AS_BUFFER,
                )

    def _error(self, message: str, hint: str) -> TaskError:
        return TaskError(message, where=self._task.place("loss"), hint=hint)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and persistent buffers, by each of their names. `state_dict` would call the
    task's code, and create a view of each.
    """
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found[prefix + key] = parameter
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                found[prefix + key] = buffer
    return found


def _samples(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """The bytes of some elements of each tensor."""
    return {key: _some(tensor) for key, tensor in tensors.items()}


def _some(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // SAMPLE)]
    values: np.ndarray[tuple[int], np.dtype[np.float64]] = some.to("cpu", torch.float64).numpy()
    return values.tobytes()
