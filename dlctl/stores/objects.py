"""What a store can do: named bytes below one address. And why it does not, as one kind of error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, Protocol

from dlctl.errors import DlctlError, NotFound

PIECE_BYTES = 4 << 20
Progress = Callable[[int], None]
"""Called with the number of bytes that have been sent since the last call."""
Cause = Literal[
    "unreachable", "throttled", "missing", "denied", "credentials", "expired", "foreign", "other"
]
LASTING: tuple[Cause, ...] = ("missing", "denied", "credentials", "expired", "foreign")
"""Causes that no repetition cures: somebody has to do something."""


class StoreError(DlctlError):
    """A store that does not do what it was asked."""

    def __init__(
        self, message: str, cause: Cause, *, where: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.cause: Cause = cause

    @property
    def is_lasting(self) -> bool:
        return self.cause in LASTING


class NoObject(NotFound):
    """There is no object of this name, in a store that answers."""


class Objects(Protocol):
    """The objects below an address. Their names are relative to it, as "a/b.json".

    Every method raises StoreError; none returns what an earlier call has cached.
    """

    address: str

    def sizes(self, below: str = "") -> dict[str, int]:
        """Every object in the folder `below` ("": all) and its size in bytes; {}: there is none."""

    def size(self, name: str) -> int | None:
        """Of one object in bytes; None: there is none."""

    def read(self, name: str) -> bytes:
        """A small object. Raises NoObject."""

    def pieces(self, name: str) -> Iterator[bytes]:
        """The bytes of a large one. Raises NoObject."""

    def put(self, name: str, path: Path, progress: Progress) -> None:
        """Store a file, however large, in place of an older object: whole, or not at all. Raises
        OSError if the file cannot be read.
        """

    def create(self, name: str, data: bytes) -> bool:
        """Store a small object if there is none; False if there is one. Where the store has no such
        operation, it looks first.
        """

    def replace(self, name: str, data: bytes) -> None:
        """Store a small object, in place of an older one."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects in this order; those that do not exist are no error."""

    def sweep(self) -> None:
        """Remove what an interrupted `put` of a checkpoint's file, or of the owner's record, has
        left and no listing shows (`layout.has`). Others may write below the address, too.
        """
