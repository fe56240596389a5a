"""The contract of all services: a need is begun, and polled after every event."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from dlctl.algorithms.needs import Need, Range
from dlctl.roles.worker.shard_client import ShardClient
from dlctl.wire.messages import Array

STUCK_S_MIN = 10.0
"""What takes no longer than this does not count as hung."""
N = TypeVar("N", bound=Need, contravariant=True)


class Phase(NamedTuple):
    """What a service waits for, as `status` and `why` show it."""

    what: str
    """"fetching", "pushing", "waiting for data" ..."""
    whom: tuple[str, ...] = ()
    """The daemons that must answer before it can continue, besides those that messages are resent
    to."""


class Service(Protocol[N]):
    """A replica waits for one need at a time; operations that a need began may outlast it.

    The role passes events and messages to a service by methods of its own.
    """

    def begin(self, need: N, now: float) -> None:
        """Begin to serve a need; the replica waits for it."""
        ...

    def poll(self, now: float) -> tuple[bool, Any]:
        """(whether the replica can continue, its result). Called after every event."""
        ...

    def phase(self) -> Phase:
        """What the replica does while it waits for the newest need, for the status."""
        ...

    def deadline(self) -> float | None:
        """When to poll again if no event arrives; None: never."""
        return None


def check_rows(rows: Array | None, clients: Sequence[ShardClient]) -> None:
    """Raises ValueError unless they are rows of this table, at least one, in ascending order."""
    if rows is None:
        return
    slices = [client.rows for client in clients if client.rows is not None]
    if not slices:
        raise ValueError("rows of a table that has no rows")
    if not rows.size or rows[0] < 0 or rows[-1] >= slices[-1].hi or (rows[1:] <= rows[:-1]).any():
        raise ValueError(f"{rows.size} rows must be ascending and below {slices[-1].hi}")


def check_ranges(ranges: Iterable[Range], size: int) -> None:
    """Raises ValueError unless each has at least one element of a table of this size."""
    for lo, hi in ranges:
        if not 0 <= lo < hi <= size:
            raise ValueError(f"[{lo}, {hi}) is not a range of a table of {size} elements")
