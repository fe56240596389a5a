"""Hundreds of classes of immutable plain values: messages, events, effects and needs.

A daemon creates all these classes at its start, and `dataclass(frozen=True)` compiles six methods
for each. Methods that need no compilation are written once here; immutability is only enforced by
the type checker.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

T = TypeVar("T")


class Record:
    """Base of what `record` decorates: equal if class and fields are."""

    __slots__ = ()
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash((type(self), self._values()))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__dataclass_fields__)
        return f"{type(self).__name__}({shown})"


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """A dataclass with slots whose equality, hash and repr come from `Record`."""
    return dataclass(slots=True, eq=False, repr=False)(cls)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def named_record(cls: type[T]) -> type[T]:
    """A `record` whose fields are given by name only."""
    return dataclass(slots=True, eq=False, repr=False, kw_only=True)(cls)
