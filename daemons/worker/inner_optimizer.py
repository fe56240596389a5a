"""The optimiser inside a replica: torch's own, over the float32 values that are the model.

Every step sets its rate (`schedule.py`); a parameter group with another rate keeps the ratio. The
saved state is indexed by tensor, so that a run may resume with other groups.
"""

from __future__ import annotations

import inspect
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from daemons.worker.nested_tensors import packed, unpacked
from daemons.worker.task.user_task import TaskError, blame, calling
from dlctl import registry
from dlctl.errors import DlctlError
from dlctl.job.config import Choice, ParameterGroup
from dlctl.job.inner import NONE, OF, SAVED_AS, identity
from dlctl.wire.messages import Array

_PYTHON = "#"
"""Suffix to the name of a state that is a Python number, not a tensor."""
_NESTED = "@"
"""Suffix to the name of a state that is a list, tuple, dict or text: its form; with numbers behind
it, the bytes of the tensors in it."""
_GROUP = "g"
"""Prefix of the number of a parameter group, where a state has that of a tensor otherwise."""
_JOB_FILE = "[inner] of the job file"
_SCALE = "lr_scale"
"""Key in a torch parameter group: the factor of its rate."""


class InnerOptimizer:
    """One or several torch optimisers, each for some of the tensors."""

    def __init__(
        self,
        choice: Choice,
        tensors: Sequence[Tensor],
        groups: Sequence[ParameterGroup | None] = (),
        names: Sequence[str] = (),
    ) -> None:
        """tensors: float32, the model's values. groups: of the job, one for each tensor; (): there
        are none. names: of the tensors, for errors. Raises DlctlError for options that the class
        does not take, TaskError for what a third-party optimiser raises.
        """
        self.tensors = list(tensors)
        self._names = names or [str(index) for index in range(len(self.tensors))]
        self._choice = choice
        self._entry = registry.load("inner_optimizers", choice.name)
        self._checked: set[int] = set()
        """The tensors with sparse gradients, which torch's optimiser takes."""
        self._identity = identity(choice)
        self._optimizers, self._steps, self._indices, self._mine = [], [], [], []
        _leave_compiler_out()
        parts = _parts(choice, self.tensors)
        self._additions = _additions(parts, groups)
        for kind, options, mine in parts if self._additions is None else ():
            of_mine = [groups[index] for index in mine] if groups else []
            tensors_of_it = [self.tensors[index] for index in mine]
            grouped, order = _in_groups(tensors_of_it, of_mine, options)
            with calling(f"making the inner optimiser {choice.name}"):
                fused = _fused(choice.name, kind, tensors_of_it)
                self._optimizers.append(kind(grouped, **options, **fused))
            self._steps.append(_step_of(self._optimizers[-1]))
            self._indices.append(order)
            self._mine.append(mine)
        self._scales = [
            [
                _scale(group, optimizer, float(choice.options["lr"]))
                for group in optimizer.param_groups
            ]
            for optimizer in self._optimizers
        ]
        self._options = [[dict(g) for g in each.param_groups] for each in self._optimizers]
        """The parameter groups before the first step."""
        self._is_fused = any(optimizer.defaults.get("fused") for optimizer in self._optimizers)

    def step(self, gradients: Sequence[Tensor | None], lr: float) -> None:
        """One step with this rate. gradients: of the tensors, in their order; None: that tensor is
        not stepped. Raises TaskError for what the optimiser raises, and before the step for sparse
        gradients that torch's class does not take.
        """
        if self._additions is not None:
            for tensor, gradient, scale in zip(
                self.tensors, gradients, self._additions, strict=True
            ):
                if gradient is not None:
                    tensor.add_(gradient, alpha=-lr * scale)
            return
        sparse = {n for n, each in enumerate(gradients) if each is not None and each.is_sparse}
        if not sparse <= self._checked or self._entry.sparse_alone:
            self._check(gradients, sparse)
        if self._is_fused:
            gradients = self._in_order(gradients)
        for tensor, gradient in zip(self.tensors, gradients, strict=True):
            tensor.grad = gradient
        of_each = zip(self._optimizers, self._steps, self._scales, strict=True)
        for optimizer, step, scales in of_each:
            for group, scale in zip(optimizer.param_groups, scales, strict=True):
                group["lr"] = lr * scale
            self._perform(step)
        for tensor in self.tensors:
            tensor.grad = None

    def _perform(self, step: Callable[[], Any]) -> None:
        """Perform a step of the optimiser; errors name the parameter. Raises TaskError."""
        try:
            step()
        except Exception as error:
            at = self._tensor_in(error)
            name = f' for parameter "{self._names[at]}"' if at >= 0 else ""
            is_sparse = at >= 0 and (given := self.tensors[at].grad) is not None and given.is_sparse
            name += ", whose gradient is sparse," if is_sparse else ""
            what = f"the step of the inner optimiser {self._choice.name}{name}"
            raise blame(what, error, _JOB_FILE) from error

    def _tensor_in(self, error: Exception) -> int:
        """The index of the tensor that a failed step was at, if one alone is in the variables of an
        inner function; else -1.
        """
        index = {id(tensor): n for n, tensor in enumerate(self.tensors)}
        index |= {id(each.grad): n for n, each in enumerate(self.tensors) if each.grad is not None}
        _, *frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        for frame in reversed(frames):
            found = {index[id(each)] for each in frame.f_locals.values() if id(each) in index}
            if len(found) == 1:
                return found.pop()
        return -1

    def _check(self, gradients: Sequence[Tensor | None], sparse: set[int]) -> None:
        """Raises TaskError for a gradient of a layout that torch's optimiser does not take. A third
        party's is tried.
        """
        if not self._entry.torch:
            return
        for n, gradient in enumerate(gradients):
            why, what = "", "sparse"
            if n in sparse:
                why = self._refuses_sparse(n)
            elif gradient is not None and self._entry.sparse_alone:
                why, what = "takes only sparse gradients", "dense"
            if why:
                of = f'parameter "{self._names[n]}"'
                raise TaskError(
                    f"{self._choice.name} {why}, and that of {of} is {what}",
                    where=_JOB_FILE,
                    hint="build its module with sparse=False; or use sgd or adagrad, which take "
                    "both kinds without weight_decay: [[parameters]] can set that to 0 for it",
                )
        self._checked |= sparse

    def _refuses_sparse(self, index: int) -> str:
        """Why torch's optimiser takes no sparse gradient of this tensor; "" if it does."""
        tensor, refused = self.tensors[index], self._entry.sparse_but_for
        if refused is None:
            return "takes no sparse gradients"
        (group,) = (
            group
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            if any(each is tensor for each in group["params"])
        )
        option = next((key for key in refused if group[key]), "")
        return option and f"with {option} takes no sparse gradients"

    def _in_order(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients as a fused kernel needs them: contiguous. It does not take sparse ones."""
        found = [gradient for gradient in gradients if gradient is not None]
        if any(gradient.is_sparse for gradient in found):
            self._is_fused = False
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["fused"] = False
            return list(gradients)
        return [None if gradient is None else gradient.contiguous() for gradient in gradients]

    def forget(self) -> None:
        """Reset the state to that of a new optimiser."""
        for optimizer, options in zip(self._optimizers, self._options, strict=True):
            optimizer.state.clear()
            for group, before in zip(optimizer.param_groups, options, strict=True):
                for key in _stepped(group, before):
                    group.pop(key)
                    group |= {key: before[key]} if key in before else {}

    def state(self) -> dict[str, Array]:
        """The whole state, by its names in a checkpoint. On the CPU it is not copied: use it before
        the next step.
        """
        found: dict[str, Array] = {OF: np.frombuffer(self._identity, np.uint8)}
        for number, optimizer in enumerate(self._optimizers):
            for place, kept in optimizer.state_dict()["state"].items():
                index = self._indices[number][place]
                for key, value in kept.items():
                    name = f"{SAVED_AS}{number}.{index}.{key}"
                    if isinstance(value, Tensor):
                        value = value.to_dense() if value.is_sparse else value
                        is_half = value.dtype is torch.bfloat16  # numpy has no bfloat16.
                        value = value.float() if is_half else value
                        found[name] = value.detach().cpu().numpy()
                    elif isinstance(value, bool | int | float):
                        found[name + _PYTHON] = np.array(value)
                    elif value is not None:
                        found |= _nested(name, value)
            found |= self._of_groups(number)
        return found

    def _of_groups(self, number: int) -> dict[str, Array]:
        """The numbers that steps have changed in the parameter groups, such as a count of them."""
        groups = zip(self._optimizers[number].param_groups, self._options[number], strict=True)
        return {
            f"{SAVED_AS}{number}.{_GROUP}{place}.{key}{_PYTHON}": np.array(group[key])
            for place, (group, before) in enumerate(groups)
            for key in _stepped(group, before)
        }

    def of_name(self, name: str) -> tuple[int, str]:
        """The index of the tensor (-1: none) and the key of a name in `state`."""
        parts = name.removeprefix(SAVED_AS).split(".", 2)
        is_of_tensor = len(parts) == 3 and parts[1].isdigit()
        if not is_of_tensor or int(parts[0]) >= len(self._mine):
            return -1, ""
        mine, index = self._mine[int(parts[0])], int(parts[1])
        return mine[index] if index < len(mine) else -1, parts[2]

    def keys(self) -> list[str]:
        """The sorted keys of the state that has a number for each element of a parameter."""
        kept = (of for each in self._optimizers for of in each.state.values())
        return sorted({key for of in kept for key, value in of.items() if _is_of_elements(value)})

    def place(self, where: Callable[[int, Sequence[str], str, Tensor], Tensor]) -> None:
        """Move state tensors to other memory. where: gets the index of a parameter, all `keys`, the
        tensor's key and the tensor; returns its replacement, of equal value.
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
        """The whole state as one vector, sorted by name: float32[n]."""
        parts = [array.ravel().astype(np.float32) for array in self._kept().values()]
        return np.concatenate([np.zeros(0, np.float32), *parts])

    def take_packed(self, packed: Array) -> None:
        """Continue with the state of another replica's optimiser. Raises DlctlError if that is of
        another model or kind.
        """
        if not packed.size:
            self.forget()
            return
        kept = self._kept()
        if not kept:
            # Most optimisers create their state in their first step; this one changes no tensor.
            self.step([torch.zeros_like(tensor) for tensor in self.tensors], 0.0)
            kept = self._kept()
        ends = np.cumsum([array.size for array in kept.values()])
        if packed.size != (own := int(ends[-1]) if kept else 0):
            raise DlctlError(
                f"another replica's optimiser has {packed.size} numbers of state, this one {own}",
                hint="the task's code must build the same model in every worker",
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
        """Load what `state` returned. Raises DlctlError if it is of another optimiser."""
        kept: list[dict[int, dict[str, Any]]] = [{} for _ in self._optimizers]
        stepped: list[dict[str, dict[int, Any]]] = [{} for _ in self._optimizers]
        if state and state[OF].tobytes() != self._identity:
            raise _of_another()
        for name, array in state.items():
            if name == OF:
                continue
            number, index, key = name.removeprefix(SAVED_AS).split(".", 2)
            if int(number) >= len(kept):
                raise _of_another()
            if index.startswith(_GROUP):
                of_key = stepped[int(number)].setdefault(key.removesuffix(_PYTHON), {})
                of_key[int(index.removeprefix(_GROUP))] = array.item()
                continue
            if int(index) not in self._indices[int(number)]:
                raise _of_another()
            place = self._indices[int(number)].index(int(index))
            of_tensor = kept[int(number)].setdefault(place, {})
            if key.endswith(_PYTHON):
                of_tensor[key.removesuffix(_PYTHON)] = array.item()
            elif key.endswith(_NESTED):
                of_tensor[key.removesuffix(_NESTED)] = _unnested(name, state)
            elif _NESTED not in key:
                of_tensor[key] = torch.from_numpy(np.array(array, order="C"))
        for optimizer, of_it, counted in zip(self._optimizers, kept, stepped, strict=True):
            saved = optimizer.state_dict() | {"state": of_it}
            if not self._fits(optimizer, of_it):
                raise _of_another()
            optimizer.load_state_dict(saved)
            for key, values in counted.items():
                for place, group in enumerate(optimizer.param_groups):
                    # A group that the run has had no number for counts as the first one.
                    group[key] = values.get(place, next(iter(values.values())))

    def _fits(self, optimizer: torch.optim.Optimizer, state: dict[int, dict[str, Any]]) -> bool:
        """Whether the state of each parameter can belong to it, by its size. A fused kernel does
        not check it. A third party's may be of any size, such as a matrix for each side.
        """
        if not self._entry.torch:
            return True
        sizes = [t.numel() for group in optimizer.param_groups for t in group["params"]]
        found = [
            (key, value.numel(), sizes[place])
            for place, kept in state.items()
            for key, value in kept.items()
            if isinstance(value, Tensor)
        ]
        if optimizer.defaults.get("fused"):
            return all(own == (1 if key == "step" else size) for key, own, size in found)
        return all(own <= max(1, size) for _, own, size in found)


_FUSED = {torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW}
"""SGD's kernel fails if some of the momentum buffers exist and others do not."""
_FOR_COMPILER = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


def _leave_compiler_out() -> None:
    """Keep torch's optimisers from importing torch's compiler, which takes one CPU second and 70 MB
    in every worker. They import it at the first call of these methods, only to say that it must not
    trace them; no task compiles the steps of a replica. If another version of torch does that
    in another way, the import happens as before.
    """
    for name in _FOR_COMPILER:
        method = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        method.__dict__.setdefault("__dynamo_disable", method)


def _fused(name: str, kind: Any, tensors: Sequence[Tensor]) -> dict[str, bool]:
    """The option for torch's fused kernel, if this built-in optimiser has one that does all its
    loop does: on the CPU it takes a third of the time. It ignores strides, so it needs contiguous
    memory.
    """
    fits = all(each.device.type == "cpu" and each.is_contiguous() for each in tensors)
    is_built_in = name in registry.BUILT_IN["inner_optimizers"]
    return {"fused": True} if is_built_in and kind in _FUSED and fits else {}


def _step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """One step. Of torch's own classes without the decorators of `step`: they turn gradients off,
    and otherwise serve the compiler, the profiler and hooks of the optimiser.
    """
    kind = type(optimizer)
    if not f"{kind.__module__}.".startswith("torch.optim."):
        return optimizer.step
    return partial(torch.no_grad()(inspect.unwrap(kind.step)), optimizer)


def _additions(
    parts: Sequence[tuple[Any, Mapping[str, Any], list[int]]],
    groups: Sequence[ParameterGroup | None],
) -> list[float] | None:
    """The rate factor of each tensor, if a step is plain SGD, which only adds gradients. torch's
    optimisers have more overhead than the addition takes. None: a step does more.
    """
    if [kind for kind, _, _ in parts] != [torch.optim.SGD]:
        return None
    ((_, options, mine),) = parts
    of_each = groups or [None] * len(mine)
    does_more = any(value for key, value in options.items() if key != "lr")
    if does_more or any(group is not None and group.weight_decay for group in of_each):
        return None
    return [1.0 if group is None else group.lr_scale for group in of_each]


def _stepped(group: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """The keys of the numbers in a parameter group that steps have changed. The rate is set anew
    for each step."""
    return [
        key
        for key, value in group.items()
        if isinstance(value, bool | int | float)
        and key not in ("lr", _SCALE)
        and (key not in before or before[key] != value)
    ]


def _nested(name: str, value: Any) -> dict[str, Array]:
    try:
        form, arrays = packed(value)
    except TaskError:
        key = name.rpartition(".")[2]
        raise TaskError(
            f'"{key}" in the state of the inner optimiser has objects that cannot be saved',
            where=_JOB_FILE,
            hint="use an optimiser whose state is of tensors, numbers, text, lists, tuples, dicts",
        ) from None
    tensors = {f"{name}{_NESTED}{number}": array for number, array in enumerate(arrays)}
    return {f"{name}{_NESTED}": np.frombuffer(json.dumps(form).encode(), np.uint8), **tensors}


def _unnested(name: str, state: Mapping[str, Array]) -> Any:
    """The value whose form has this name."""
    form = json.loads(state[name].tobytes())
    arrays = [np.array(state[f"{name}{number}"]) for number in range(len(form[1]))]
    return unpacked(form, arrays)


def _is_of_elements(value: Any) -> bool:
    """Whether a value may have a number for each element of a parameter, unlike a step count."""
    return isinstance(value, Tensor) and value.ndim > 0


def _of_another() -> DlctlError:
    return DlctlError(
        "the checkpoint has the state of another inner optimiser",
        hint="start with the previous [inner], or with --fresh",
    )


def make(
    choice: Choice,
    tensors: Sequence[Tensor],
    groups: Sequence[ParameterGroup | None] = (),
    names: Sequence[str] = (),
) -> InnerOptimizer | None:
    """The optimiser of the job; None: its replicas make no steps of their own."""
    return None if choice.name == NONE else InnerOptimizer(choice, tensors, groups, names)


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
    """The parameter groups for torch's optimiser; and the index of the tensor of each of its
    parameters.
    """
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
    """The rate of a torch parameter group, relative to the job's rate. lr: the job's peak rate."""
    if not lr:
        return float(group.get(_SCALE, 1.0))
    if _SCALE in group:
        return float(optimizer.defaults.get("lr", lr) / lr * group[_SCALE])
    return float(group["lr"] / lr)
