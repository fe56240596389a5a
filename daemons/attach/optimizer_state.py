"""The state of the user's optimiser in a checkpoint, by the names of the parameters: with its
parameter groups, and the learning rate schedulers and the GradScaler that the script has given.

Lists of tensors, counts of steps in the groups and the like are saved as well, whoever has written
the optimiser.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from daemons.attach.model_vector import ModelVector
from daemons.attach.stored_state import (
    OMITTED,
    StateWriter,
    as_document,
    of_document,
    value_of,
    values_of,
)
from dlctl.errors import DlctlError
from dlctl.job.inner import OF, SAVED_AS
from dlctl.wire.messages import Array

SCRIPT = "script"
"""The name of the optimiser in `[inner]`."""
DOCUMENT = f"{SAVED_AS}document"
"""Name of all that is no tensor, and of where the tensors belong."""
OF_PARAMETERS = f"{SAVED_AS}state"
"""Prefix of the state of parameters, followed by their names."""


class OptimizerState:
    """stepped: the keys of the parameter groups that steps change: state, unlike the options."""

    def __init__(
        self, optimizer: Optimizer, model: ModelVector, schedulers: Sequence[Any], scaler: Any
    ) -> None:
        self.stepped: set[str] = set()
        self._optimizer, self._model = optimizer, model
        self._schedulers, self._scaler = list(schedulers), scaler
        self._kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"

    # ------------------------------------------------------------ in a checkpoint

    def state(self) -> dict[str, Array]:
        """See `UserOptimizer.state`."""
        writer = StateWriter(self._model.copies.whole)
        parameters: list[Any] = []
        shared: list[Any] = []
        for owner, values in self._optimizer.state.items():
            if isinstance(owner, Tensor):
                name = self._name_of(owner)
                parameters.append([name, writer.put_all(f"{OF_PARAMETERS}.{name}", values)])
            elif (described := writer.put(f"{SAVED_AS}shared.{owner}", values)) is not OMITTED:
                shared.append([owner, described])
        groups = [
            [self._names_of(group), writer.put_all(f"{SAVED_AS}group.{number}", _options(group))]
            for number, group in enumerate(self._optimizer.param_groups)
        ]
        schedulers = [
            writer.put_all(f"{SAVED_AS}scheduler.{number}", scheduler.state_dict())
            for number, scheduler in enumerate(self._schedulers)
        ]
        of_scaler = self._scaler.state_dict() if self._scaler is not None else {}
        document = {
            "parameters": parameters,
            "shared": shared,
            "groups": groups,
            "stepped": sorted(self.stepped),
            "schedulers": schedulers,
            "scaler": writer.put_all(f"{SAVED_AS}scaler", of_scaler),
        }
        identity = as_document([SCRIPT, {"class": self._kind}])
        return {OF: identity, DOCUMENT: as_document(document), **writer.arrays}

    def restore(self, state: Mapping[str, Array]) -> None:
        """See `UserOptimizer.restore`."""
        document = self._fitting(state)
        owned = {
            self._name_of(parameter): (parameter, group)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }
        for group, (_, described) in zip(
            self._optimizer.param_groups, document["groups"], strict=True
        ):
            _restore_options(group, values_of(described, state))
        self._optimizer.state.clear()
        for name, described in document["parameters"]:
            parameter, group = owned[name]
            self._optimizer.state[parameter] = {
                key: value_of(each, state, self._place(parameter, group, key))
                for key, each in described.items()
            }
        whole: dict[Any, Any] = self._optimizer.state
        for owner, described in document["shared"]:
            whole[owner] = value_of(described, state)
        self.stepped = set(document["stepped"])
        for scheduler, described in zip(self._schedulers, document["schedulers"], strict=True):
            was, values = scheduler.state_dict(), values_of(described, state)
            # MultiStepLR counts its milestones.
            counted = {key: Counter(values[key]) for key in values if type(was.get(key)) is Counter}
            scheduler.load_state_dict(values | counted)
        if self._scaler is not None and document["scaler"]:
            self._scaler.load_state_dict(values_of(document["scaler"], state))

    def _fitting(self, state: Mapping[str, Array]) -> Any:
        """The document of a state, if it is one of this optimizer. Raises DlctlError."""
        name, told = of_document(state[OF]) if OF in state else ("none", {})
        if name != SCRIPT or told["class"] != self._kind:
            theirs = told.get("class", f'[inner] name = "{name}"')
            raise _of_another(f"is of {theirs}, and the script has {self._kind}")
        document = of_document(state[DOCUMENT])
        theirs = [names for names, _ in document["groups"]]
        mine = [self._names_of(group) for group in self._optimizer.param_groups]
        has, wants = ({name for names in each for name in names} for each in (theirs, mine))
        if others := sorted(has ^ wants):
            what = "not" if others[0] in wants else "also"
            raise _of_another(f'is {what} of parameter "{others[0]}"')
        if theirs != mine:
            raise _of_another("has the parameters in other groups than the script's optimizer")
        if len(document["schedulers"]) != len(self._schedulers):
            had, given = len(document["schedulers"]), len(self._schedulers)
            raise _of_another(f"is of {had} schedulers, and the script has given {given}")
        return document

    def _name_of(self, parameter: Tensor) -> str:
        name = self._model.name_of(parameter)
        if name is None:
            raise DlctlError(
                "the optimizer has a parameter that the model has not",
                hint="add parameters to the model and to the optimizer before dlctl.attach",
            )
        return name

    def _names_of(self, group: Mapping[str, Any]) -> list[str]:
        return [self._name_of(parameter) for parameter in group["params"]]

    # ------------------------------------------------------------ for another replica

    def packed(self) -> Array:
        """See `UserOptimizer.packed`."""
        parts = [
            self._whole(value).detach().to("cpu", torch.float32).numpy().ravel()
            if isinstance(value, Tensor)
            else np.array([value], np.float32)
            for _, _, value in self._leaves()
        ]
        return np.concatenate([np.zeros(0, np.float32), *parts])

    def size(self) -> int:
        """Of `packed()`."""
        return sum(_sizes([*self._leaves()]))

    @torch.no_grad()
    def take_packed(self, packed: Array) -> None:
        """Raises DlctlError if it is of another size."""
        leaves = [*self._leaves()]
        sizes = _sizes(leaves)
        if packed.size != sum(sizes):
            raise DlctlError(
                f"another replica's optimizer has {packed.size} numbers of state, this one "
                f"{sum(sizes)}",
                hint="the script must make the same model and optimizer in every worker",
            )
        parts = np.split(packed, np.cumsum(sizes)[:-1])
        for (holder, key, value), part in zip(leaves, parts, strict=True):
            if isinstance(value, Tensor):
                whole = torch.from_numpy(part.copy()).view(value.shape)
                value.copy_(self._model.copies.part(whole, value))
            else:
                holder[key] = type(value)(part[0])

    def _whole(self, tensor: Tensor) -> Tensor:
        whole = self._model.copies.whole(tensor)
        return torch.empty(0) if whole is None else whole

    def _place(
        self, parameter: Tensor, group: Mapping[str, Any], key: str
    ) -> Callable[[Tensor], Tensor]:
        """Where torch keeps a tensor of the state: beside the parameter, except for the count of
        steps, which only some kernels read there.
        """
        is_count = key == "step" and not (group.get("capturable") or group.get("fused"))

        def place(tensor: Tensor) -> Tensor:
            if is_count or tensor.shape != parameter.shape:
                return tensor if is_count else tensor.to(parameter.device)
            # Of the parameter's strides: a fused kernel ignores them.
            room = torch.empty_like(parameter, dtype=tensor.dtype)
            return room.copy_(self._model.copies.part(tensor, parameter))

        return torch.no_grad()(place)

    def _leaves(self) -> Iterator[tuple[Any, Any, Any]]:
        """(what holds it, under which key, the value) of all tensors and numbers of the state, in
        an order that is the same in all replicas.
        """
        whole: dict[Any, Any] = self._optimizer.state
        named = {self._name_of(o) if isinstance(o, Tensor) else o: o for o in whole}
        for name in sorted(named):
            yield from _leaves_at(whole, named[name])
        for group in self._optimizer.param_groups if whole else ():
            for key in sorted(self.stepped & group.keys()):
                yield group, key, group[key]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _restore_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        now = group.get(key)
        if isinstance(now, Tensor) and isinstance(value, Tensor):
            now.copy_(value)  # A compiled step has this object.
        else:
            group[key] = value


def _sizes(leaves: Sequence[tuple[Any, Any, Any]]) -> list[int]:
    return [value.numel() if isinstance(value, Tensor) else 1 for *_, value in leaves]


def _leaves_at(holder: Any, key: Any) -> Iterator[tuple[Any, Any, Any]]:
    value = holder[key]
    is_number = isinstance(value, bool | int | float) and not isinstance(holder, tuple)
    if is_number or isinstance(value, Tensor):
        yield holder, key, value
    elif isinstance(value, list | tuple | dict):
        for inner in sorted(value) if isinstance(value, dict) else range(len(value)):
            yield from _leaves_at(value, inner)


def _of_another(how: str) -> DlctlError:
    return DlctlError(
        f"the optimizer's state in the checkpoint {how}",
        hint="restart with the model, optimizer and schedulers that the run was trained with; or "
        "start a new run with --fresh",
    )
