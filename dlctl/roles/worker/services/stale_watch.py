"""Finds out that the gradient which is being computed has become too old to be of use.

The parameters that it is of were read at some clock of each shard. So each shard is asked for one
value, once its clock is further by what the method allows (`Gradient.stale_after`). It holds this
read until then, and its answer is the news. Nothing is asked where no computation could stop.
"""

from __future__ import annotations

from dlctl.roles.worker.fetching import Fetched, Fetcher


class StaleWatch:
    """Of one gradient at a time."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._asked: list[Fetched] = []

    def begin(self, updates: int) -> None:
        """updates: on every shard since the parameters were read, with which the gradient is too
        old."""
        self.end()
        self._asked = [
            self._fetcher.start(
                client.basis.version + updates, part=(client.lo, client.lo + 1), is_held=True
            )
            for client in self._fetcher.tables[0]
            if client.lo < client.hi
        ]

    def is_stale(self) -> bool:
        """Whether all shards have answered. One alone may be ahead of the others: these would use
        the gradient.
        """
        return bool(self._asked) and all(fetched.complete for fetched in self._asked)

    def end(self) -> None:
        """The gradient is there, or was given up."""
        for fetched in self._asked:
            self._fetcher.drop(fetched)
        self._asked = []
