"""What a method may do by what it declares, and whether its declarations agree with each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dlctl import outdated
from dlctl.algorithms.base import Method, ReplicaSide, Shape, ShardSide
from dlctl.algorithms.means import Mean
from dlctl.algorithms.needs import (
    PARAMETERS,
    Ask,
    Collective,
    Done,
    Engine,
    Gradient,
    Need,
    NextData,
    NextRows,
    OwnState,
    OwnStep,
    Read,
    Settle,
    Write,
)
from dlctl.job import parties
from dlctl.job.inner import NONE

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
"""The names that a table may have: they are used in file names and headers."""


def faults_of(method: Method) -> list[str]:
    """Errors of the method itself, not of the job file, one sentence each."""
    shape, found = method.shape, []
    names = [table.name for table in shape.tables]
    if len(set(names)) != len(names):
        found.append(f"it has two tables of one name: {', '.join(names)}")
    if names and names[0] != PARAMETERS:
        found.append(f'its first table is "{names[0]}", and has to be "{PARAMETERS}"')
    if wrong := [name for name in names if not _NAME.fullmatch(name)]:
        found.append(f"these names of tables are no names of files: {', '.join(wrong)}")
    if any(table.rule == "optimizer" for table in shape.tables[1:]):
        found.append("only the parameters can follow the servers' optimiser")
    follows = any(table.rule == "optimizer" for table in shape.tables)
    if follows != (method.shard is not None):
        found.append("it needs a shard side if a table follows the optimiser, and none without")
    if names and shape.progress not in names:
        found.append(f'its progress is that of "{shape.progress}", which is none of its tables')
    copies = [table.copies is not None for table in shape.tables]
    if copies != sorted(copies):
        found.append(
            "its tables with copies come last, or the others' numbers would depend on them"
        )
    if any(table.copies is not None and table.rule != "lead" for table in shape.tables):
        found.append('tables with copies are the lead\'s: their rule is "lead"')
    if any(table.of_rows and table.rule != "add" for table in shape.tables):
        found.append('what is pushed to tables of rows is added: their rule is "add"')
    if method.is_driven != any(table.rule == "lead" for table in shape.tables):
        found.append('it needs tables of rule "lead" if the coordinator drives it, and none else')
    unknown = [key for key in method.live_in_shards if key not in method.live]
    if unknown:
        found.append(f"its shard side reads live options that are none: {', '.join(unknown)}")
    asks = method.shard is not None and method.shard.of(method.Options()).asks_lead
    if asks and not method.lead.chooses:
        found.append(
            "its shard side asks the lead which pushes count, and the lead does not choose"
        )
    if method.mean is not Mean and not (method.shard is not None and method.shard.averages):
        found.append("it says how pushes are averaged, and its shard side averages none")
    if method.shard is not None:
        pushed = method.push_kind(method.Options())
        if not (pushed.is_all or pushed.is_displacement):
            found.append("a part of its steps is pushed (is_all=False) that is no displacement")
    if bool(shape.engine) != bool(shape.twin):
        found.append("it needs an engine and its twin, or neither")
    if shape.ranks and not shape.engine:
        found.append("its replicas can be several processes, and have no engine")
    found += _faults_of_parts(shape)
    if "memory" in shape.links and (shape.model != "replica" or shape.needs_servers):
        found.append('its replicas share one model: it has no tables, and model = "replica"')
    return found


def _faults_of_parts(shape: Shape) -> list[str]:
    found, known = [], [part.role for part in shape.parts]
    if known != [""] and known != [*parties.ROLES]:
        found.append(f"its parts are {', '.join(known)}: parties have {', '.join(parties.ROLES)}")
    if shape.is_divided and (shape.engine or "peers" not in shape.links or len(shape.tables) != 1):
        found.append("its parts ask each other: they have one table, links of peers, own engines")
    if any(bool(part.engine) != bool(part.twin) for part in shape.parts):
        found.append("each of its parts needs an engine and its twin, or neither")
    if not shape.parts[0].has_data:
        found.append("its first part has no data, and the run's buffers are those of that part")
    if lost := {part.asks for part in shape.parts} - {"", *known}:
        found.append(f"its parts ask {', '.join(sorted(lost))}, which is none of them")
    return found


def check_names(side: ReplicaSide | ShardSide) -> None:
    """Raises TypeError if an attribute of a side has the name of a hook, which it would hide."""
    base = ReplicaSide if isinstance(side, ReplicaSide) else ShardSide
    for name in vars(side):
        if callable(getattr(base, name, None)):
            kind = type(side)
            raise TypeError(
                f"{kind.__module__}.{kind.__qualname__} sets `self.{name}`, which is a method of "
                f"{base.__name__}: give the attribute another name, as `self._{name}`"
            )


def why_no_loop(method: Method) -> str:
    """Why a training loop of the user's own cannot train with this method; "" if it can. Such a
    loop makes steps on data that it is given, and knows nothing but its model and its optimiser.
    """
    shape = method.shape
    if method.is_driven:
        return "the coordinator decides which batches are computed, and at which parameters"
    if "memory" in shape.links:
        return "its replicas share the memory of one model"
    if any(table.of_rows for table in shape.tables):
        return "it asks which rows a batch reads"
    if shape.is_divided:
        return "its model is divided among parties, each with a task"
    if shape.engine:
        return "its engine works inside of the replica"
    return ""


UNDECLARED: Mapping[type[Need], str] = {
    Read: "it declares no tables (Shape.tables)",
    Write: "it declares no tables (Shape.tables)",
    Settle: "it declares no tables (Shape.tables)",
    Ask: 'it declares no links "peers" (Shape.links)',
    Collective: 'it declares no links "group" (Shape.links)',
    Engine: "it declares no engine (Shape.engine, Shape.twin)",
    OwnStep: "it declares no optimiser of the replicas (Method.inner)",
    OwnState: "it declares no optimiser of the replicas (Method.inner)",
}
"""Why a need is not served to a method that yields it."""


def served(method: Method) -> frozenset[type[Need]]:
    """The kinds of needs that a method may yield, by what it declares."""
    shape = method.shape
    found: set[type[Need]] = {NextData, NextRows, Gradient, Done}
    found |= {Read, Write, Settle} if shape.tables else set()
    found |= {Ask} if "peers" in shape.links else set()
    found |= {Collective} if "group" in shape.links else set()
    found |= {Engine} if shape.has_engine else set()
    found |= {OwnStep, OwnState} if method.inner.name != NONE else set()
    return frozenset(found)


if not TYPE_CHECKING:
    __getattr__ = outdated.names_of(__name__)
