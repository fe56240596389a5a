"""Options that may change while a run goes on: `local_steps: Live[Annotated[int, Ge(1)]] = 16`."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar, get_args, get_origin

_Type = TypeVar("_Type")


class _IsLive:
    """The mark in the type of such an option."""


Live = Annotated[_Type, _IsLive]
"""The type of an option that `dlctl set` changes, written as users write a value of that type."""


def is_live(hint: Any) -> bool:
    return get_origin(hint) is Annotated and _IsLive in get_args(hint)[1:]
