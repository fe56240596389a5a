"""A model that its task changes after `model()` has returned it, so that nobody else hears of it.

The run has the tensors that were there then: servers step those that are trained, buffers are
averaged, frozen parameters are taken to be the same everywhere. What the task does beyond that, in
a forward pass or between two, would be trained on one worker, evaluated there, and be missing or
stale in what is saved. So it ends the run, with the name of the first such tensor.

A look costs some milliseconds for hundreds of tensors. There is one after 1, 2, 4, 8 ... steps and
then so seldom that all of them take a few thousandths of the time; values are compared by samples.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from daemons.worker.task import Task, TaskError

log = logging.getLogger("dlctl")
SAMPLE = 256
"""Elements of a tensor, evenly spread, that are looked at."""
LOOK_S = 1.0
SHARE = 0.002
"""Of the time, at most, that looking may take."""
PATIENCE = 10
"""Steps in a row that a parameter has to be frozen for: two models that are trained in turns, as
those of a GAN, freeze each other for some."""
_MADE = "is different on every worker, is not trained, and is missing in what is saved"


class ModelChanges:
    """Made when the model is bound to its vector. `begin` comes before each loss of a batch, `end`
    after its backward pass, while there are gradients. All raise TaskError but `begin`.
    """

    def __init__(self, task: Task, model: nn.Module) -> None:
        self._task = task
        self._model = model
        self._parameters = {key: p for key, p in _tensors(model).items() if _is_parameter(p)}
        self._buffers = _tensors(model).keys() - self._parameters
        self._was_trained = {key: p.requires_grad for key, p in self._parameters.items()}
        self._frozen = [key for key, trained in self._was_trained.items() if not trained]
        self._trained = [
            key
            for key, parameter in self._parameters.items()
            if parameter.requires_grad and parameter.dtype is torch.float32
        ]
        self._steps, self._look_at = 0, 0.0
        self._before: list[bytes] | None = None
        """Of the trained parameters, if this step is looked at."""
        self._odd: dict[str, int] = {}
        """Parameter whose requires_grad is not what it was -> steps in a row."""
        self._turns: set[str] = set()
        """Those that have gone back: they are trained in turns."""
        self._told = False
        self.record()

    def record(self) -> None:
        """The frozen parameters are meant to be what they are now: they have been loaded."""
        self._values = self._sample(self._frozen)

    def others_step(self) -> None:
        """The trained parameters may change at any time: it need not be the task that does it."""
        self._trained = []

    def begin(self) -> None:
        self._steps += 1
        is_due = not self._steps & (self._steps - 1) or time.monotonic() >= self._look_at
        self._before = self._sample(self._trained) if is_due else None

    def end(self) -> None:
        if self._odd:
            self._look_at_odd()
        if self._before is None:
            return
        begun = time.monotonic()
        self._check_trained(self._before)
        self.check()
        for key in self._parameters:
            if key not in self._turns and self._is_odd(key):
                self._odd.setdefault(key, 0)
        now = time.monotonic()
        self._look_at = now + max(LOOK_S, 2 * (now - begun) / SHARE)

    def check(self) -> None:
        """Raises TaskError for a tensor that was made, removed, replaced, or changed though it is
        frozen.
        """
        now = _tensors(self._model)
        self._check_names(now)
        for key, parameter in self._parameters.items():
            if now[key] is not parameter:
                raise self._error(
                    f'parameter "{key}" was replaced after model() had returned: the new one '
                    f"{_MADE}",
                    'make it in model(), and change its values in place ("copy_")',
                )
        for key, was, is_now in zip(
            self._frozen, self._values, self._sample(self._frozen), strict=True
        ):
            if was != is_now:
                raise self._error(
                    f'the task changes parameter "{key}", which is frozen (requires_grad=False): '
                    "each worker has other values then, and what is saved has none of them",
                    "make it a buffer (register_buffer): the workers' buffers are averaged, "
                    "evaluated and exported",
                )

    def _check_names(self, now: dict[str, Tensor]) -> None:
        known = self._parameters.keys() | self._buffers
        for key, tensor in now.items():
            if key not in known:
                hint = (
                    "make it in model(), or let model() run one batch before it returns the model"
                )
                if not _is_parameter(tensor):
                    hint = (
                        "register it in model(), or with persistent=False if it is not to be saved"
                    )
                raise self._error(
                    f'{_kind(tensor)} "{key}" was made after model() had returned: it {_MADE}', hint
                )
        for key in sorted(known - now.keys()):
            kind = "parameter" if key in self._parameters else "buffer"
            raise self._error(
                f'{kind} "{key}" was removed after model() had returned, and would still be saved',
                "remove it in model()",
            )

    def _check_trained(self, before: list[bytes]) -> None:
        """What the task itself writes into a trained parameter lasts until the next fetch. To keep
        weights within bounds that may do; what has no gradient is an average that is lost.
        """
        for key, was, is_now in zip(
            self._trained, before, self._sample(self._trained), strict=True
        ):
            parameter = self._parameters[key]
            if was == is_now or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                raise self._error(
                    f'the task changes parameter "{key}", which has no gradient: the servers do '
                    "not hear of it, and evaluate and save it as it was at first",
                    "make it a buffer (register_buffer): the workers' buffers are averaged, "
                    "evaluated and exported",
                )
            if not self._told:
                log.warning(
                    'task.loss itself changes the trained parameter "%s": servers hear of the '
                    "gradient alone, and a fetch takes the change back",
                    key,
                )
                self._told = True

    def _is_odd(self, key: str) -> bool:
        """Whether it is treated in another way than model() has said."""
        parameter = self._parameters[key]
        if self._was_trained[key]:
            return not parameter.requires_grad and parameter.grad is None
        return parameter.requires_grad

    def _look_at_odd(self) -> None:
        for key, steps in [*self._odd.items()]:
            was = self._was_trained[key]
            if not self._is_odd(key):
                del self._odd[key]
                self._turns.add(key)
            elif steps + 1 < PATIENCE:
                self._odd[key] = steps + 1
            else:
                what = "trained, and has been frozen" if was else "frozen, and has been trained"
                raise self._error(
                    f'parameter "{key}" was {what} (requires_grad={not was}) for {PATIENCE} steps: '
                    "the servers go on as when model() had returned",
                    "set requires_grad in model(); to change it, stop and begin a new run with "
                    "what is exported",
                )

    def _sample(self, keys: Iterable[str]) -> list[bytes]:
        """Of each parameter, some of its elements, bit by bit."""
        return [_some(self._parameters[key]) for key in keys]

    def _error(self, message: str, hint: str) -> TaskError:
        return TaskError(message, where=self._task.place("loss"), hint=hint)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and persistent buffers by all their names. Not by `state_dict`, which calls
    code of the task's and copies nothing, but makes a view of each.
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


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _kind(tensor: Tensor) -> str:
    return "parameter" if _is_parameter(tensor) else "buffer"


def _some(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // SAMPLE)]
    values: np.ndarray[tuple[int], np.dtype[np.float64]] = some.to("cpu", torch.float64).numpy()
    return values.tobytes()
