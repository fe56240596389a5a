"""The range that a type allows, in words: `Annotated[float, Gt(0), Le(1)]` is "> 0", "<= 1"; and
whether a value is in it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

from annotated_types import Ge, Gt, Le, Len, Lt

_SIGNS = ((Ge, ">=", "ge"), (Gt, ">", "gt"), (Le, "<=", "le"), (Lt, "<", "lt"))


def holds(hint: Any, value: Any) -> bool:
    """Whether a value is within the range of an annotation, which must not be a union."""
    return all(
        getattr(operator, name)(value, getattr(constraint, name))
        for constraint in get_args(hint)[1:]
        for kind, _, name in _SIGNS
        if isinstance(constraint, kind)
    )


def bound(constraint: Any) -> str:
    """One end of a range, as in ">= 1", or a length; "" if it is something else."""
    if isinstance(constraint, Len):
        return f"{constraint.min_length} to {constraint.max_length} characters"
    for kind, sign, attribute in _SIGNS:
        if isinstance(constraint, kind):
            return f"{sign} {_number(getattr(constraint, attribute))}"
    return ""


def bounds(hint: Any) -> Iterator[list[str]]:
    """The ends of each range in an annotation; several if it is a union."""
    if get_origin(hint) is Annotated:
        inner, *constraints = get_args(hint)
        yield from bounds(inner)
        if found := [text for text in map(bound, constraints) if text]:
            yield found
    else:
        for arg in get_args(hint):
            yield from bounds(arg)


def _number(value: Any) -> str:
    return f"{int(value)}" if float(value).is_integer() and abs(value) < 1e12 else f"{value:g}"
