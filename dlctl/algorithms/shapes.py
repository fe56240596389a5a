"""Check whether a method matches its declared shape, without running it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import CodeType, FunctionType

from dlctl.algorithms import needs
from dlctl.algorithms.base import Lead, Method, ReplicaSide
from dlctl.algorithms.needs import (
    PARAMETERS,
    Ask,
    Collective,
    Engine,
    Need,
    OwnState,
    OwnStep,
    Read,
    Write,
)
from dlctl.inner import NONE

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
"""Of a table: it is used in file names and headers."""


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
    rows = [table.rows is not None for table in shape.tables]
    if rows != sorted(rows):
        found.append("its tables with rows come last, or the others' numbers would depend on them")
    if any(table.rows is not None and table.rule != "lead" for table in shape.tables):
        found.append('tables with rows are the lead\'s: their rule is "lead"')
    if any(table.of_rows and table.rule != "add" for table in shape.tables):
        found.append('what is pushed to tables of rows is added: their rule is "add"')
    is_driven = method.lead.drive is not Lead.drive
    if is_driven != any(table.rule == "lead" for table in shape.tables):
        found.append('it needs tables of rule "lead" if the coordinator drives it, and none else')
    asks = method.shard is not None and method.shard.of(method.Options()).asks_lead
    if asks and method.lead.quorum is Lead.quorum:
        found.append("its shard side asks the lead which pushes count, and the lead has no quorum")
    if bool(shape.engine) != bool(shape.twin):
        found.append("it needs an engine and its twin, or neither")
    if shape.ranks and not shape.engine:
        found.append("its replicas can be several processes, and have no engine")
    if "memory" in shape.links and (shape.model != "replica" or shape.needs_servers):
        found.append('its replicas share one model: it has no tables, and model = "replica"')
    asked = needs_of(method.replica)
    for kinds, has_it, what in (
        ({Read, Write}, bool(names), "reads or writes, and declares no tables"),
        ({Ask}, "peers" in shape.links, 'asks other replicas, and does not declare links "peers"'),
        ({Collective}, "group" in shape.links, 'has collectives, and no links "group"'),
        ({Engine}, bool(shape.engine), "uses an engine, and declares none"),
        (
            {OwnStep, OwnState},
            method.inner.name != NONE,
            "has steps of its own, and no optimiser",
        ),
    ):
        if asked & kinds and not has_it:
            found.append(f"it {what}")
    return found


def needs_of(replica: type[ReplicaSide]) -> set[type[Need]]:
    """The kinds of needs that its code names, its own functions' and their helpers'."""
    found: set[type[Need]] = set()
    for kind in replica.__mro__:
        if kind in ReplicaSide.__mro__:
            continue
        for member in vars(kind).values():
            if isinstance(member, FunctionType):
                found |= _named_in(member)
    return found


def _named_in(function: FunctionType) -> set[type[Need]]:
    found: set[type[Need]] = set()
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        if inspect.isclass(value) and issubclass(value, Need):
            found.add(value)
        elif value is needs.mean:
            found |= {Read, Write}
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
