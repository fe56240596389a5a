"""The sequence of modules that forms most of a model, such as the blocks of a transformer: where it
can be cut into stages, and what FSDP gathers at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from daemons.worker.task.user_task import Task, TaskError

CONTAINERS = (nn.Sequential, nn.ModuleList)


class StagedModel(NamedTuple):
    """A model cut into stages."""

    stages: tuple[tuple[str, ...], ...]
    """The names of the modules of each stage, in the order of their calls."""
    stage_bytes: tuple[int, ...]
    """Bytes of each stage's parameters; those outside all stages count with the first."""


def uses_of(model: nn.Module) -> Counter[int]:
    """Id of a parameter -> in how many places it is."""
    return Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))


def units(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules in sequences that are not sequences themselves, and share no parameter
    with other modules.
    """
    uses = uses_of(model)
    seen: set[nn.Module] = set()
    for container in model.modules():
        if container in seen or not isinstance(container, CONTAINERS):
            continue
        for module in container.children():
            if isinstance(module, CONTAINERS):
                continue
            mine = uses_of(module)
            if mine and module not in seen and all(uses[key] == n for key, n in mine.items()):
                yield module
                seen.update(module.modules())


def cut(task: Task, model: nn.Module, count: int) -> StagedModel:
    """Cut a model into `count` stages: as the task's `stages` says, or so that the largest stage is
    as small as possible. Raises TaskError.
    """
    if task.has("stages"):
        return _as_declared(task, model, count)
    cuts = [
        _balanced(model, names, count)
        for names in _sequences(model)
        if len(names) >= count and _bytes(model, names)
    ]
    if not cuts:
        raise TaskError(
            f"the model has no sequence of modules that could be cut into {count} stages",
            where=task.place("model"),
            hint="put them into an nn.Sequential or nn.ModuleList, or write stages(model), which "
            "returns a list of module names for each stage",
        )
    return min(cuts, key=lambda each: max(each.stage_bytes))


def _sequences(model: nn.Module) -> Iterator[tuple[str, ...]]:
    for name, module in model.named_modules():
        if isinstance(module, CONTAINERS):
            yield tuple(f"{name}.{key}" if name else key for key, _ in module.named_children())


def _as_declared(task: Task, model: nn.Module, count: int) -> StagedModel:
    stages = tuple(map(tuple, task.stages(model)))
    known = dict(model.named_modules())
    where = task.place("stages")
    for name in (name for stage in stages for name in stage):
        if not name or name not in known:
            raise TaskError(
                f'task.stages names "{name}": the model has no such module', where=where
            )
    if len(stages) != count or not all(stages):
        raise TaskError(
            f"task.stages returned {len(stages)} stages of {', '.join(map(str, map(len, stages)))} "
            f"modules; replica.pipeline is {count}",
            where=where,
            hint="return a list of names for each stage, at least one",
        )
    return _with_bytes(model, stages)


def _bytes(model: nn.Module, names: Sequence[str]) -> int:
    found = {id(p): p.nbytes for name in names for p in model.get_submodule(name).parameters()}
    return sum(found.values())


def _with_bytes(model: nn.Module, stages: tuple[tuple[str, ...], ...]) -> StagedModel:
    of_each = [_bytes(model, stage) for stage in stages]
    inside = _bytes(model, [name for stage in stages for name in stage])
    of_each[0] += sum(p.nbytes for p in model.parameters()) - inside
    return StagedModel(stages, tuple(of_each))


def _balanced(model: nn.Module, names: tuple[str, ...], count: int) -> StagedModel:
    sizes = [_bytes(model, [name]) for name in names]
    outside = sum(p.nbytes for p in model.parameters()) - _bytes(model, names)
    lo, hi = max([*sizes, outside + sizes[0]]), outside + sum(sizes)
    while lo < hi:
        most = (lo + hi) // 2
        if len(_filled(sizes, outside, most)) <= count:
            hi = most
        else:
            lo = most + 1
    ends = _filled(sizes, outside, lo)
    while len(ends) < count:  # Further cuts make no stage larger.
        begins = [0, *ends[:-1]]
        longest = max(range(len(ends)), key=lambda n: ends[n] - begins[n])
        ends.insert(longest, (begins[longest] + ends[longest]) // 2)
    begins = [0, *ends[:-1]]
    return _with_bytes(model, tuple(names[a:b] for a, b in zip(begins, ends, strict=True)))


def _filled(sizes: Sequence[int], outside: int, most: int) -> list[int]:
    """The ends of the stages if each is filled with up to `most` bytes."""
    ends, held = [], outside
    for at, size in enumerate(sizes):
        if at and held + size > most:
            ends.append(at)
            held = 0
        held += size
    return [*ends, len(sizes)]
