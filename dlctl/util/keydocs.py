"""The keys of a job file, read from the dataclasses that own them: name, type, limits, text.

`dlctl algorithms NAME` and the manual pages show them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from itertools import chain, pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from dlctl.util import bounds
from dlctl.util.live import is_live

_TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false"}


CHANGES = "Changes live."


class KeyDoc(NamedTuple):
    """The description of one key of a section."""

    name: str
    type: str
    limits: str
    """ ">= 1, <= 4096", or ""."""
    default: str
    """The default as written in a job file; "" if the key is required."""
    text: str


def keys(section: type[Any]) -> list[KeyDoc]:
    """The keys of a dataclass. The keys of a nested table follow it, with dotted names."""
    texts = _texts(section)
    hints = get_type_hints(section, include_extras=True)
    found = []
    for field in dataclasses.fields(section):
        name, hint = field.name, hints[field.name]
        limits = ", ".join(chain.from_iterable(bounds.bounds(hint)))
        text = f"{texts.get(name, '')} {CHANGES if is_live(hint) else ''}".strip()
        found.append(KeyDoc(name, _type(hint), limits, _default(field), text))
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found += [key._replace(name=f"{name}.{key.name}") for key in keys(hint)]
    return found


def _texts(section: type[Any]) -> dict[str, str]:
    """Field -> the string below it, in this class and its bases."""
    texts: dict[str, str] = {}
    for owner in filter(dataclasses.is_dataclass, reversed(section.__mro__)):
        try:
            source = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        except OSError:
            continue  # It was installed without its source.
        body = ast.iter_child_nodes(source.body[0])
        for statement, below in pairwise(body):
            match statement, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=text)),
                ):
                    texts[name] = " ".join(str(text).split())
    return texts


def _type(hint: Any) -> str:
    """The type of an annotation, in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _type(args[0])
    if origin is Literal:
        return " or ".join(map(to_toml, args))
    if origin in (Union, UnionType):
        return " or ".join(_type(arg) for arg in args if arg is not NoneType)
    return _TYPES.get(hint, "array" if origin in (list, tuple) else "table")


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
