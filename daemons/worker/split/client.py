"""A client of split learning: the parts of a task that the worker trains, made of its party's task.

The model of the worker has the layers up to the cut and, with "u", the last ones. Its loss sends z
to the head, waits for the answer, and has its gradient. The same model predicts by asking the head:
so the task's `evaluate(model)` is written as for a model in one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from daemons.worker.split import dcor
from daemons.worker.split.tensors import described, received, sent
from daemons.worker.task.user_task import TaskError, calling
from dlctl.algorithms.methods.split import BACKWARD, FORWARD, PREDICT, SAMPLES_MIN, STEP
from dlctl.wire.messages import Array

Ask = Callable[[str, tuple[Array, ...]], tuple[Array, ...]]
"""(operation, tensors as arrays) -> the head's answer. It says which batch it is about."""


class Options(Protocol):
    shape: str
    alpha: float


class ClientModel(nn.Module):
    """What a client trains; called with x it predicts, by asking the head."""

    def __init__(self, client: nn.Module, top: nn.Module | None, ask: Ask) -> None:
        super().__init__()
        self.client = client
        self.top = nn.Identity() if top is None else top
        self._ask = ask

    def forward(self, x: Tensor) -> Tensor:
        z = self.client(x)
        output: Tensor = received(*self._ask(PREDICT, sent(z))).to(z.device)
        return self.top(output)  # type: ignore[no-any-return]


class ClientParts:
    """The task of a worker of a client: what it does not change is the user's."""

    def __init__(self, user: Any, options: Options, party: str) -> None:
        """party: its name. Raises TaskError for a task that lacks a part."""
        self._user, self._options, self._party = user, options, party
        self.ask: Ask = _nobody
        """Set before the model is used."""
        needed = ["client_model", "dataset"]
        needed += ["top_model", "loss"] if options.shape == "u" else []
        check_parts(user, needed, party, f'a client of shape = "{options.shape}"')

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._user, name)

    def model(self) -> nn.Module:
        with calling("task.client_model"):
            client = checked(self._user.client_model(), "client_model")
        top = None
        if self._options.shape == "u":
            with calling("task.top_model"):
                top = checked(self._user.top_model(), "top_model")
        return ClientModel(client, top, lambda op, arrays: self.ask(op, arrays))

    def loss(self, model: Any, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        """The loss of the whole model, whose gradient is that of this party's layers."""
        x, y = self._pair(batch)
        with calling("task.client_model"):
            z = model.client(x)
        self._check_cut(x, z)
        if self._options.shape == "u":
            value, gradient = self._of_top(model, z, y)
        else:
            *gradients, losses = self.ask(STEP, (*sent(z), *sent(y)))
            value, gradient = torch.tensor(losses[0]), received(*gradients)
        loss = with_gradient(value.to(z.device), z, gradient.to(z.device))
        return self._with_leakage(loss, x, z)

    def _of_top(self, model: Any, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss behind the top layers, with their gradient, and dL/dz."""
        while True:
            a = received(*self.ask(FORWARD, sent(z))).to(z.device).requires_grad_()
            with calling("task.loss"):
                value = self._user.loss(model.top(a), y)
            if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
                raise TaskError(
                    f'task.loss of party "{self._party}" returned no loss',
                    where=_place(self._user, "loss"),
                    hint="loss(output, y) returns a mean over the batch, a 0-d tensor",
                )
            (slope,) = torch.autograd.grad(value, [a], retain_graph=True)
            answer = self.ask(BACKWARD, sent(slope))
            if answer:  # Else another process of the head has not seen the first half.
                return value, received(*answer)

    def _with_leakage(self, loss: Tensor, x: Tensor, z: Tensor) -> tuple[Tensor, dict[str, Any]]:
        if len(x) < SAMPLES_MIN:
            if self._options.alpha:
                raise TaskError(
                    f"a batch of {len(x)} samples has no distance correlation: it needs "
                    f"{SAMPLES_MIN} or more",
                    hint="raise workers.batch_size, or set alpha = 0 in [algorithm]",
                )
            return loss, {}
        with torch.no_grad():
            metrics = {"u_dcor2": dcor.u_dcor2(x.float(), z.float())}
        if self._options.alpha:
            leakage = dcor.dcor(x.float(), z.float())
            metrics["dcor"] = leakage.detach()
            loss = loss + self._options.alpha * leakage
        return loss, metrics

    def _pair(self, batch: Any) -> tuple[Tensor, Tensor]:
        is_pair = isinstance(batch, tuple | list) and len(batch) == 2
        if is_pair and all(isinstance(each, Tensor) for each in batch):
            return batch[0], batch[1]
        raise TaskError(
            f'a batch of party "{self._party}" is no pair of tensors (x, y)',
            where=_place(self._user, "dataset"),
            hint="a sample of dataset() is (x, y); collate(samples) may make the pair",
        )

    def _check_cut(self, x: Tensor, z: Any) -> None:
        """Raises TaskError for what cannot be sent to the head."""
        is_batch = isinstance(z, Tensor) and z.ndim > 1 and len(z) == len(x)
        if is_batch and z.dtype in (torch.float32, torch.float16, torch.bfloat16):
            return
        what = f"{described(z)} with {len(z)} samples" if isinstance(z, Tensor) and z.ndim else "no"
        raise TaskError(
            f'client_model of party "{self._party}" returned {what}: the cut is one float tensor '
            f"with a row for each of the {len(x)} samples",
            where=_place(self._user, "client_model"),
            hint="return the activations, as float32[samples, ...]",
        )


def with_gradient(value: Tensor, z: Tensor, gradient: Tensor) -> Tensor:
    """A 0-d tensor of this value whose gradient by z is `gradient`, beside that of the value."""
    along = (z * gradient.to(z.dtype)).sum()
    return value + (along - along.detach())


def check_parts(user: Any, needed: list[str], party: str, who: str) -> None:
    """Raises TaskError naming the parts that a party's task lacks."""
    missing = [part for part in needed if not callable(getattr(user, part, None))]
    if missing:
        raise TaskError(
            f'the task of party "{party}" lacks {" and ".join(f"{part}()" for part in missing)}',
            where=_place(user, ""),
            hint=f"{who} has {', '.join(f'{part}()' for part in needed)}",
        )


def checked(model: Any, part: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"task.{part} returned a value of type {type(model).__name__}, not a torch.nn.Module",
            hint="return the layers of this party",
        )
    return model


def _place(user: Any, part: str) -> str | None:
    from daemons.worker.task import user_task

    return user_task._place(getattr(user, part, None) or user)


def _nobody(op: str, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    raise AssertionError("the model is used before there is a head to ask")
