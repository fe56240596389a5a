"""The optimiser inside a replica: torch's own, over the float32 values that are the model.

Its rate is told with every step (`schedule.py`); a group whose rate is another one keeps the ratio.
What is saved goes by the tensors, so that a run may go on with other groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from daemons.worker.task import calling
from dlctl import registry
from dlctl.config import Choice, ParameterGroup
from dlctl.errors import DlctlError
from dlctl.inner import NONE, OF, SAVED_AS, identity
from dlctl.messages import Array

_PYTHON = "#"
"""Behind the name of a state that is a number of Python's, and no tensor."""
_SCALE = "lr_scale"
"""In a group of torch's: of its rate."""


class InnerOptimizer:
    """One or several of torch's optimisers that share out the tensors."""

    def __init__(
        self,
        choice: Choice,
        tensors: Sequence[Tensor],
        groups: Sequence[ParameterGroup | None] = (),
    ) -> None:
        """tensors: float32, the model's values. groups: of the job, one for each tensor; (): there
        are none. Raises DlctlError for options that the class does not take, TaskError for what
        somebody else's raises.
        """
        self.tensors = list(tensors)
        self._identity = identity(choice)
        self._optimizers, self._indices, self._mine = [], [], []
        parts = _parts(choice, self.tensors)
        self._additions = _additions(parts, groups)
        for kind, options, mine in parts if self._additions is None else ():
            of_mine = [groups[index] for index in mine] if groups else []
            grouped, order = _in_groups([self.tensors[i] for i in mine], of_mine, options)
            with calling(f"making the inner optimiser {choice.name}"):
                self._optimizers.append(kind(grouped, **options))
            self._indices.append(order)
            self._mine.append(mine)
        self._scales = [
            [
                _scale(group, optimizer, float(choice.options["lr"]))
                for group in optimizer.param_groups
            ]
            for optimizer in self._optimizers
        ]

    def step(self, gradients: Sequence[Tensor | None], lr: float) -> None:
        """One step with this rate. gradients: of the tensors, in their order; None: that one stays
        as it is.
        """
        if self._additions is not None:
            for tensor, gradient, scale in zip(
                self.tensors, gradients, self._additions, strict=True
            ):
                if gradient is not None:
                    tensor.add_(gradient, alpha=-lr * scale)
            return
        for tensor, gradient in zip(self.tensors, gradients, strict=True):
            tensor.grad = gradient
        for optimizer, scales in zip(self._optimizers, self._scales, strict=True):
            for group, scale in zip(optimizer.param_groups, scales, strict=True):
                group["lr"] = lr * scale
            optimizer.step()
        for tensor in self.tensors:
            tensor.grad = None

    def forget(self) -> None:
        """Be as a new one is."""
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def state(self) -> dict[str, Array]:
        """All that it keeps, under its names in a checkpoint; on a CPU as it is, without a copy: it
        must be used before the next step.
        """
        found: dict[str, Array] = {OF: np.frombuffer(self._identity, np.uint8)}
        for number, optimizer in enumerate(self._optimizers):
            for place, kept in optimizer.state_dict()["state"].items():
                index = self._indices[number][place]
                for key, value in kept.items():
                    name = f"{SAVED_AS}{number}.{index}.{key}"
                    if isinstance(value, Tensor):
                        is_half = value.dtype is torch.bfloat16  # numpy has none.
                        value = value.float() if is_half else value
                        found[name] = value.detach().cpu().numpy()
                    elif value is not None:
                        found[name + _PYTHON] = np.array(value)
        return found

    def of_name(self, name: str) -> tuple[int, str]:
        """Of a name in `state` the number of its tensor, -1 if there is no such, and its key."""
        parts = name.removeprefix(SAVED_AS).split(".", 2)
        if len(parts) < 3 or int(parts[0]) >= len(self._mine):
            return -1, ""
        mine, index = self._mine[int(parts[0])], int(parts[1])
        return mine[index] if index < len(mine) else -1, parts[2]

    def keys(self) -> list[str]:
        """The names of what its optimisers keep of a parameter, in order."""
        kept = (of for each in self._optimizers for of in each.state.values())
        return sorted({key for of in kept for key, value in of.items() if _is_of_elements(value)})

    def place(self, where: Callable[[int, Sequence[str], str, Tensor], Tensor]) -> None:
        """Have tensors that are kept lie elsewhere. where: is told the number of a parameter, all
        `keys`, the tensor's one and itself, and gives what is to take its place, of equal value.
        """
        keys = self.keys()
        of_each = zip(self._optimizers, self._indices, self._mine, strict=True)
        for optimizer, indices, mine in of_each:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for parameter, index in zip(parameters, indices, strict=True):
                kept = optimizer.state.get(parameter, {})
                for key, value in kept.items():
                    if _is_of_elements(value):
                        kept[key] = where(mine[index], keys, key, value)

    def packed(self) -> Array:
        """All that it keeps, as one vector in the order of its names: float32[n]."""
        parts = [array.ravel().astype(np.float32) for array in self._kept().values()]
        return np.concatenate([np.zeros(0, np.float32), *parts])

    def take_packed(self, packed: Array) -> None:
        """Go on with what another replica's one keeps. Raises DlctlError if that is of another
        model or kind.
        """
        if not packed.size:
            self.forget()
            return
        kept = self._kept()
        if not kept:
            # Most make what they keep with their first step; this one goes nowhere.
            self.step([torch.zeros_like(tensor) for tensor in self.tensors], 0.0)
            kept = self._kept()
        ends = np.cumsum([array.size for array in kept.values()])
        if packed.size != (own := int(ends[-1]) if kept else 0):
            raise DlctlError(
                f"another replica's optimiser keeps {packed.size} numbers, this one {own}",
                hint="the task's code has to build the same model everywhere",
            )
        parts = np.split(packed, ends[:-1])
        taken = {
            name: part.reshape(array.shape).astype(array.dtype)
            for (name, array), part in zip(kept.items(), parts, strict=True)
        }
        self.restore({OF: np.frombuffer(self._identity, np.uint8), **taken})

    def _kept(self) -> dict[str, Array]:
        state = self.state()
        return {name: state[name] for name in sorted(state) if name != OF}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go on from what `state` was. Raises DlctlError if it is another optimiser's."""
        kept: list[dict[int, dict[str, Any]]] = [{} for _ in self._optimizers]
        if state and state[OF].tobytes() != self._identity:
            raise _of_another()
        for name, array in state.items():
            if name == OF:
                continue
            number, index, key = name.removeprefix(SAVED_AS).split(".", 2)
            is_number = key.endswith(_PYTHON)
            value = array.item() if is_number else torch.from_numpy(np.array(array))
            if int(number) >= len(kept) or int(index) not in self._indices[int(number)]:
                raise _of_another()
            place = self._indices[int(number)].index(int(index))
            kept[int(number)].setdefault(place, {})[key.removesuffix(_PYTHON)] = value
        for optimizer, of_it in zip(self._optimizers, kept, strict=True):
            saved = optimizer.state_dict() | {"state": of_it}
            if not self._fits(optimizer, of_it):
                raise _of_another()
            optimizer.load_state_dict(saved)

    def _fits(self, optimizer: torch.optim.Optimizer, state: dict[int, dict[str, Any]]) -> bool:
        """Whether what is kept for a parameter could be of it."""
        sizes = [t.numel() for group in optimizer.param_groups for t in group["params"]]
        return all(
            max((v.numel() for v in kept.values() if isinstance(v, Tensor)), default=0)
            <= max(1, sizes[place])
            for place, kept in state.items()
        )


def _additions(
    parts: Sequence[tuple[Any, Mapping[str, Any], list[int]]],
    groups: Sequence[ParameterGroup | None],
) -> list[float] | None:
    """Of each tensor the part of the rate, if all that a step does is to add the gradients: it
    takes torch's classes longer to come to that than to do it, and the first of them has torch's
    compiler imported, a second of a CPU. None: it does more.
    """
    if [kind for kind, _, _ in parts] != [torch.optim.SGD]:
        return None
    ((_, options, mine),) = parts
    of_each = groups or [None] * len(mine)
    does_more = any(value for key, value in options.items() if key != "lr")
    if does_more or any(group is not None and group.weight_decay for group in of_each):
        return None
    return [1.0 if group is None else group.lr_scale for group in of_each]


def _is_of_elements(value: Any) -> bool:
    """Whether it may have a number for each element of a parameter: a count of steps has not."""
    return isinstance(value, Tensor) and value.ndim > 0


def _of_another() -> DlctlError:
    return DlctlError(
        "the checkpoint has the state of another inner optimiser",
        hint="start with the [inner] of before, or with --fresh",
    )


def make(
    choice: Choice, tensors: Sequence[Tensor], groups: Sequence[ParameterGroup | None] = ()
) -> InnerOptimizer | None:
    """None: the replicas of this job make no steps of their own."""
    return None if choice.name == NONE else InnerOptimizer(choice, tensors, groups)


def _parts(
    choice: Choice, tensors: Sequence[Tensor]
) -> list[tuple[Any, dict[str, Any], list[int]]]:
    """(class, options, which tensors) of each optimiser."""
    if not tensors:
        return []
    entry, options = registry.load("inner_optimizers", choice.name), dict(choice.options)
    if not entry.torch:
        with calling(f"importing the inner optimiser {choice.name}"):
            return [(registry.attribute(choice.name), options, [*range(len(tensors))])]
    kind, rest = getattr(torch.optim, entry.torch), options.pop("adamw", None)
    if rest is None:
        return [(kind, options, [*range(len(tensors))])]
    matrices = [index for index, tensor in enumerate(tensors) if tensor.ndim == 2]
    others = [index for index, tensor in enumerate(tensors) if tensor.ndim != 2]
    found = [(kind, options, matrices), (torch.optim.AdamW, rest, others)]
    return [part for part in found if part[2]]


def _in_groups(
    tensors: list[Tensor], groups: Sequence[ParameterGroup | None], options: Mapping[str, Any]
) -> tuple[list[Any], list[int]]:
    """As torch's optimisers take them; and which tensor of these each parameter of theirs is."""
    if not any(groups):
        return list(tensors), [*range(len(tensors))]
    kinds: dict[ParameterGroup | None, list[int]] = {}
    for index, group in enumerate(groups):
        kinds.setdefault(group, []).append(index)
    made = []
    for group, mine in kinds.items():
        scale = group.lr_scale if group is not None else 1.0
        one = {"params": [tensors[i] for i in mine], "lr": options["lr"] * scale, _SCALE: scale}
        if group is not None and group.weight_decay is not None:
            one["weight_decay"] = group.weight_decay
        made.append(one)
    return made, [index for mine in kinds.values() for index in mine]


def _scale(group: Mapping[str, Any], optimizer: torch.optim.Optimizer, lr: float) -> float:
    """What the job's rate, of which lr is the peak, is multiplied by for a group of torch's."""
    if not lr:
        return float(group.get(_SCALE, 1.0))
    if _SCALE in group:
        return float(optimizer.defaults.get("lr", lr) / lr * group[_SCALE])
    return float(group["lr"] / lr)
