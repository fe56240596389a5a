"""What the role asks of rank 0 alone, and all ranks of a replica have to take part in: reading the
whole state of an optimizer of which each has a part, for example.

Rank 0 makes the calls. Those that all have to make it announces to the others, which follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from daemons.attach.ranks import ReplicaRanks
from dlctl.errors import DlctlError

ALL = frozenset({
    "scatter", "gather", "frozen", "load_frozen", "load_averaged",  # ModelVector
    "state", "restore", "packed", "take_packed", "step_along",  # UserOptimizer
})  # fmt: skip
"""The methods that all ranks call together."""
OF_RANK_0 = frozenset({"step_along"})
"""Those whose argument is a vector, which only rank 0 has."""


class RankCall(NamedTuple):
    target: str
    method: str
    arguments: tuple[Any, ...]


class LedCalls:
    """targets: what the calls are made of, by name; of this rank."""

    def __init__(self, ranks: ReplicaRanks, targets: Mapping[str, Any]) -> None:
        self._ranks, self._targets = ranks, targets

    @contextmanager
    def leading(self) -> Iterator[None]:
        """In rank 0: within this it makes calls, and the others are in `follow`."""
        try:
            yield
        finally:
            self._ranks.of_rank_0(lambda: None)

    def follow(self) -> None:
        """In the others."""
        while (call := self._ranks.of_rank_0(_nothing)) is not None:
            self._make(call)

    def make(self, call: RankCall) -> Any:
        """In rank 0. Raises what the call raises here, or DlctlError for another rank's error."""
        is_of_rank_0 = call.method in OF_RANK_0
        self._ranks.of_rank_0(lambda: call._replace(arguments=()) if is_of_rank_0 else call)
        returned, errors = self._make(call)
        if isinstance(returned, Exception):
            raise returned
        for rank, error in enumerate(errors):
            if error:
                raise DlctlError(f"rank {rank}: {error}")
        return returned

    def _make(self, call: RankCall) -> tuple[Any, list[str]]:
        """What it returns, or raises; and in rank 0 the errors of all."""
        method = getattr(self._targets[call.target], call.method)
        arguments = call.arguments
        if not arguments and call.method in OF_RANK_0:
            arguments = (None,)
        try:
            returned, error = method(*arguments), ""
        except Exception as raised:
            returned, error = raised, f"{type(raised).__name__}: {raised}"
        return returned, self._ranks.gathered(error)


class InAllRanks:
    """Rank 0's view of a target: methods of `ALL` are called in all ranks."""

    def __init__(self, calls: LedCalls, name: str, target: Any) -> None:
        self._calls, self._name, self._target = calls, name, target

    def __getattr__(self, key: str) -> Any:
        found = getattr(self._target, key)
        if key not in ALL:
            return found
        return lambda *arguments: self._calls.make(RankCall(self._name, key, arguments))


def _nothing() -> RankCall | None:
    """Only rank 0 tells something."""
    return None
