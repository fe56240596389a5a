"""The keys of a job file, read from the dataclasses that own them: name, type, limits, text.

`dlctl algorithms NAME` and the manual pages show them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from annotated_types import Len

from dlctl.util import bounds

_TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false"}


class Key(NamedTuple):
    """The description of one key of a section."""

    name: str
    type: str
    limits: str
    """ ">= 1, <= 4096", or ""."""
    default: str
    """As written in a job file; "" if the key is required."""
    text: str


def keys(section: type[Any]) -> list[Key]:
    """The keys of a dataclass. The keys of a nested table follow it, with dotted names."""
    texts = _texts(section)
    hints = get_type_hints(section, include_extras=True)
    found = []
    for field in dataclasses.fields(section):
        kind, limits = _describe(hints[field.name])
        found.append(Key(field.name, kind, limits, _default(field), texts.get(field.name, "")))
        if dataclasses.is_dataclass(hints[field.name]):
            nested = keys(hints[field.name])
            found += [key._replace(name=f"{field.name}.{key.name}") for key in nested]
    return found


def _texts(section: type[Any]) -> dict[str, str]:
    """Field -> the string below it, in this class and its bases."""
    texts: dict[str, str] = {}
    for owner in filter(dataclasses.is_dataclass, reversed(section.__mro__)):
        body = list(
            ast.iter_child_nodes(ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0])
        )
        for statement, below in pairwise(body):
            match statement, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=text)),
                ):
                    texts[name] = " ".join(str(text).split())
    return texts


def _describe(hint: Any) -> tuple[str, str]:
    """Type and limits of an annotation, in words."""
    if get_origin(hint) is Annotated:
        inner, *metadata = get_args(hint)
        kind, limits = _describe(inner)
        return kind, ", ".join(filter(None, [limits, *map(_limit, metadata)]))
    if get_origin(hint) is Literal:
        return " or ".join(to_toml(choice) for choice in get_args(hint)), ""
    if isinstance(hint, UnionType) or get_origin(hint) not in (None, list, tuple, dict):
        described = [_describe(arg) for arg in get_args(hint) if arg is not NoneType]
        kinds = " or ".join(kind for kind, _ in described)
        return kinds, ", ".join(limits for _, limits in described if limits)
    if dataclasses.is_dataclass(hint):
        return "table", ""
    return _TYPES.get(hint, "array" if get_origin(hint) in (list, tuple) else "table"), ""


def _limit(constraint: Any) -> str:
    if isinstance(constraint, Len):
        return f"{constraint.min_length} to {constraint.max_length} characters"
    return bounds.bound(constraint)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return to_toml(field.default_factory())
    return "" if field.default is dataclasses.MISSING else to_toml(field.default)


def to_toml(value: Any) -> str:
    """A value as written in a job file; TOML has no null, so None becomes "none"."""
    if value is None:
        return "none"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {k: v for k, v in dataclasses.asdict(value).items() if v is not None}
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {to_toml(v)}" for k, v in value.items()) + " }"
    return json.dumps(value)
