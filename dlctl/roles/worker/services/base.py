"""The contract of all services: a need is begun, and looked at again after every event."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from dlctl.algorithms.needs import Need, Range
from dlctl.messages import Array
from dlctl.roles.worker.shard_client import ShardClient

N = TypeVar("N", bound=Need, contravariant=True)


class Phase(NamedTuple):
    """What a service waits for, as `status` and `why` show it."""

    what: str
    """"fetching", "pushing", "waiting for data" ..."""
    whom: tuple[str, ...] = ()
    """The daemons that must answer before it can go on."""


class Service(Protocol[N]):
    """A replica waits for one need at a time; what a need has begun may go on after it.

    Events and messages come to a service by methods of its own, from the role.
    """

    def begin(self, need: N, now: float) -> None:
        """The replica waits for this from now on."""
        ...

    def poll(self, now: float) -> tuple[bool, Any]:
        """(whether the replica can go on, what it is resumed with). Asked after every event."""
        ...

    def phase(self) -> Phase:
        """Of the need that was begun last and is not done."""
        ...

    def deadline(self) -> float | None:
        """When to ask again if nothing happens; None: never."""
        ...


def check_rows(rows: Array | None, clients: Sequence[ShardClient]) -> None:
    """Raises ValueError unless they are rows of this table, at least one, in ascending order."""
    if rows is None:
        return
    slices = [client.rows for client in clients if client.rows is not None]
    if not slices:
        raise ValueError("rows of a table that is none of rows")
    if not rows.size or rows[0] < 0 or rows[-1] >= slices[-1].hi or (rows[1:] <= rows[:-1]).any():
        raise ValueError(f"{rows.size} rows, ascending and of {slices[-1].hi}, are possible")


def check_ranges(ranges: Iterable[Range], size: int) -> None:
    """Raises ValueError unless each has at least one element of a table of this size."""
    for lo, hi in ranges:
        if not 0 <= lo < hi <= size:
            raise ValueError(f"[{lo}, {hi}) is no range of a table of {size} elements")
