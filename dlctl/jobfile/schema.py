"""Unknown keys, types and ranges: the dataclasses, checked by pydantic, with our messages."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from typing import Any, TypeVar, get_args, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from dlctl.jobfile.faults import Fault
from dlctl.jobfile.positions import KeyPath
from dlctl.registry import ALIASES
from dlctl.util import bounds
from dlctl.util.did_you_mean import closest, did_you_mean

T = TypeVar("T")
SUGGESTIONS_MAX = 100
"""Suggestions for misspelt keys of one table; each takes a comparison with every known key."""
_MISSING = "\0 nothing"
_GOT = " (got "
_TYPES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text in quotes",
    "bool_type": "must be true or false",
    "dataclass_type": "must be a table",
    "dict_type": "must be a table",
    "list_type": "must be an array",
    "tuple_type": "must be an array",
}
_BOUNDS = {
    "greater_than": Gt,
    "greater_than_equal": Ge,
    "less_than": Lt,
    "less_than_equal": Le,
}


def validate(
    kind: type[T], values: dict[str, Any], at: KeyPath = (), also: Iterable[str] = ()
) -> tuple[T | None, list[Fault]]:
    """Build a dataclass (of dataclasses) from a table, or return all of its faults.

    at: path of the table in the document. also: keys that the table may have besides its fields,
    for suggestions only. Strict: "4" and 4.0 are not 4, and an unknown key is a fault whatever the
    dataclass itself declares.
    """
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    unknown = [(key, value) for key, value in values.items() if key not in known]
    faults = [
        _unknown((*at, key), value, [*known, *also], suggest=number < SUGGESTIONS_MAX)
        for number, (key, value) in enumerate(unknown)
    ]
    sound = {key: value for key, value in values.items() if key in known}
    try:
        adapter: TypeAdapter[T] = _adapter(kind)  # type: ignore[arg-type]
        built = adapter.validate_json(json.dumps(sound), strict=True)
    except ValidationError as error:
        wrong = [
            _fault(kind, detail, sound, at, suggest=number < SUGGESTIONS_MAX)
            for number, detail in enumerate(error.errors(include_url=False))
        ]
        return None, faults + _joined(wrong)
    return (None if faults else built), faults


def _joined(faults: Iterable[Fault]) -> list[Fault]:
    """One fault for each key: if a value has none of several types, each of them reports one."""
    joined: dict[KeyPath, Fault] = {}
    for fault in faults:
        known = joined.setdefault(fault.path, fault)
        if known is not fault:
            first, also = known.message.partition(_GOT), fault.message.partition(_GOT)
            message = f"{first[0]} or {also[0].removeprefix('must be ')}{first[1]}{first[2]}"
            joined[fault.path] = known._replace(
                message=message, suggestion=known.suggestion or fault.suggestion
            )
    return list(joined.values())


@functools.cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """Building one takes longer than all else that is done to a job file."""
    return TypeAdapter(kind)


def _unknown(path: KeyPath, value: Any, known: Iterable[str], *, suggest: bool) -> Fault:
    what = "unknown section" if len(path) == 1 and isinstance(value, dict | list) else "unknown key"
    known = list(known)
    meant = did_you_mean(str(path[-1]), known, ALIASES) if suggest else ""
    meant = meant if known else "it has no keys"
    return Fault(path, what, meant, at_key=True)


def _fault(
    kind: Any, detail: ErrorDetails, values: dict[str, Any], at: KeyPath, *, suggest: bool
) -> Fault:
    path, value = _follow(detail["loc"], values, is_missing=detail["type"] == "missing")
    if detail["type"] == "unexpected_keyword_argument":
        known = _keys_at(kind, path[:-1])
        return _unknown((*at, *path), value, known, suggest=suggest)
    if detail["type"] == "missing" and isinstance(path[-1], int):
        return Fault((*at, *path[:-1]), "has too few values")
    if detail["type"] == "missing":
        what = f'"{path[-1]}"' if at or len(path) > 1 else f"section [{path[-1]}]"
        return Fault((*at, *path), f"{what} is missing", at_key=True)
    got = "" if value is _MISSING else f"{_GOT}{_shown(value)})"
    suggestion = ""
    if detail["type"] == "literal_error" and isinstance(value, str):
        choices = detail["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        meant = closest(value, choices, ALIASES)
        suggestion = f'did you mean "{meant}"?' if meant else ""
    message = _range(kind, path, detail) if detail["type"] in _BOUNDS else _message(detail)
    return Fault((*at, *path), message + got, suggestion)


def _range(kind: Any, path: KeyPath, detail: ErrorDetails) -> str:
    """The whole range of a value: pydantic names only the violated bound."""
    (limit,) = detail["ctx"].values()
    beyond = bounds.bound(_BOUNDS[detail["type"]](limit))
    whole = (ends for ends in bounds.bounds(_hint_at(kind, path)) if beyond in ends)
    return f"must be {' and '.join(next(whole, [beyond]))}"


def _message(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _TYPES:
        return _TYPES[kind]
    if kind == "literal_error":
        return f"must be {context['expected']}".replace("'", '"')
    if kind == "value_error":
        return str(context["error"])
    return detail["msg"][:1].lower() + detail["msg"][1:]


def _follow(loc: KeyPath, values: Any, *, is_missing: bool) -> tuple[KeyPath, Any]:
    """The part of pydantic's location that is in the document, and the value there.

    A location may continue inside a value with the names of a union's branches; that of a key that
    is_missing ends with that key.
    """
    path: KeyPath = ()
    for part in loc:
        if not isinstance(values, dict | list):
            break
        try:
            values = values[part]  # type: ignore[index]
        except (KeyError, TypeError, IndexError):
            return (path, values) if path and not is_missing else ((*path, part), _MISSING)
        path = (*path, part)
    return path, values


@functools.cache
def _hint_at(kind: Any, path: KeyPath) -> Any:
    """The annotation of a key."""
    for part in path:
        # A number is the place in an array, tuple[X, ...].
        if isinstance(part, int):
            kind = get_args(kind)[0]
        else:
            kind = get_type_hints(kind, include_extras=True)[part]
    return kind


def _keys_at(kind: Any, path: KeyPath) -> list[str]:
    return [field.name for field in dataclasses.fields(_hint_at(kind, path))]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "an array"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
