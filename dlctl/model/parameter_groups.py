"""`[[parameters]]`: the group of each parameter, and the positions of its elements.

A parameter belongs to the first group with a pattern for one of its names. In a replica the groups
are torch's (`daemons/worker/inner_optimizer.py`), on a shard they are runs of elements
(`optim/grouped.py`).
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from dlctl.job.config import ParameterGroup
from dlctl.model.flat import TRAINED, Layout
from dlctl.util import bounds, numeric_limits

NONE = -1
"""The group number of parameters that are in no group."""
SHOWN_MAX = 10
"""Names in an error."""
_WORDS = re.compile(r"[^A-Za-z0-9_]+")


class GroupRun(NamedTuple):
    """Consecutive elements of a shard, of one group; the first run begins at 0."""

    end: int
    group: int


def group_of(groups: Sequence[ParameterGroup], names: Iterable[str]) -> int:
    """The number of the group of a parameter, or NONE. names: all of its names."""
    known = list(names)
    for number, group in enumerate(groups):
        if any(fnmatchcase(name, pattern) for pattern in group.match for name in known):
            return number
    return NONE


def of_trained(groups: Sequence[ParameterGroup], layout: Layout) -> list[int]:
    """The groups of the trained parameters, in their order."""
    entries = (entry for entry, _, _ in layout.slices(TRAINED))
    return [group_of(groups, (entry.name, *entry.aliases)) for entry in entries]


def of_each(groups: Sequence[ParameterGroup], layout: Layout) -> list[ParameterGroup | None]:
    """The group of each trained parameter, in their order; None: it is in none."""
    return [None if n == NONE else groups[n] for n in of_trained(groups, layout)]


def runs(groups: Sequence[ParameterGroup], layout: Layout, lo: int, hi: int) -> list[GroupRun]:
    """The elements [lo, hi) of the flat vector, split where another group begins."""
    found: list[GroupRun] = []
    numbers = of_trained(groups, layout)
    for (_, begin, end), group in zip(layout.slices(TRAINED), numbers, strict=True):
        if max(begin, lo) >= min(end, hi):
            continue
        if found and found[-1].group == group:
            found.pop()
        found.append(GroupRun(min(end, hi) - lo, group))
    return found


def described(groups: Sequence[ParameterGroup], layout: Layout) -> list[str]:
    """A summary of each group for this model, one line each; [] without groups."""
    if not groups:
        return []
    tensors: Counter[int] = Counter()
    values: Counter[int] = Counter()
    for (_, lo, hi), number in zip(layout.slices(TRAINED), of_trained(groups, layout), strict=True):
        tensors[number] += 1
        values[number] += hi - lo
    lines = [
        f"[[parameters]] {', '.join(group.match)}: {tensors[number]} tensors of "
        f"{values[number]:,} values, {_how(group)}"
        for number, group in enumerate(groups)
        if group.train
    ]
    return [*lines, f"in no group: {tensors[NONE]} tensors of {values[NONE]:,} values"]


def _how(group: ParameterGroup) -> str:
    decay = "" if group.weight_decay is None else f"weight_decay {group.weight_decay:g}, "
    return f"{decay}lr x {group.lr_scale:g}"


def unmatched(groups: Sequence[ParameterGroup], names: Sequence[str]) -> list[str]:
    """Patterns that match no parameter."""
    return [
        pattern
        for group in groups
        for pattern in group.match
        if not any(fnmatchcase(name, pattern) for name in names)
    ]


def close_to(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Suggestions for patterns without a match: names that share a similar word with one of them.
    If there are none, the first names.
    """
    words = {word for name in names for word in _WORDS.split(name)}
    meant = {
        close
        for pattern in patterns
        for word in _WORDS.split(pattern)
        for close in difflib.get_close_matches(word, words)
    }
    close = [name for name in names if meant.intersection(_WORDS.split(name))]
    return (close or list(names))[:SHOWN_MAX]


# ---------------------------------------------------------------- checks of a job file

Found = tuple[tuple[str | int, ...], str, str]
"""Key, message, suggestion."""


class Steps(NamedTuple):
    """An optimiser that takes gradient steps."""

    name: str
    options: Mapping[str, Any]
    is_servers: bool
    has_decay: bool


def faults(
    groups: Sequence[ParameterGroup], steps: Sequence[Steps], method: str
) -> Iterator[Found]:
    """Faults of the groups of a job. steps: the optimisers that they apply to."""
    for number, group in enumerate(groups):
        at = ("parameters", number)
        is_changed = group.weight_decay is not None or group.lr_scale != 1.0
        if not group.match:
            yield (*at, "match"), "has no pattern", 'as in ["*.bias", "*norm*"]'
        if is_changed and not group.train:
            what = "what is not trained has neither a rate nor a decay"
            yield (*at, "train"), what, "remove lr_scale and weight_decay"
        elif is_changed and not steps:
            key = "lr_scale" if group.weight_decay is None else "weight_decay"
            what = f"{method} has no optimiser that takes gradient steps"
            yield (*at, key), what, "remove it"
        else:
            for each in steps:
                yield from _of_group(at, group, each)


def _of_group(at: tuple[str | int, ...], group: ParameterGroup, steps: Steps) -> Iterator[Found]:
    decay = steps.options.get("weight_decay", 0.0)
    if group.weight_decay is not None:
        decay = group.weight_decay
        if decay and not steps.has_decay:
            yield (*at, "weight_decay"), f"{steps.name} has no weight_decay", "use 0, or remove it"
            return
    if not steps.is_servers or not group.train:
        return
    lr = steps.options.get("lr", 0.0) * group.lr_scale
    if not bounds.holds(numeric_limits.LearningRate, lr) and group.lr_scale:
        yield (*at, "lr_scale"), f"lr times it is {lr:g}, beyond all rates", ""
    elif fault := numeric_limits.decay_fault(lr, decay):
        key = "lr_scale" if group.weight_decay is None else "weight_decay"
        yield (*at, key), fault, f"{numeric_limits.most_with(lr)} is the most decay with this rate"


def has_decay(options: type[Any] | None) -> bool:
    """Whether an optimiser with such options decays weights; None: its options are unknown."""
    if options is None:
        return True
    return any(field.name == "weight_decay" for field in dataclasses.fields(options))
