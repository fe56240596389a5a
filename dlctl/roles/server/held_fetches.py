"""Reads that wait for a clock, or for a push of their own worker, the oldest first.

With a barrier nearly all workers wait here while the last pushes come, so what a push costs must
not grow with them: as long as the clock is the same, it is only its own worker's reads that it may
be for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dlctl.wire import messages as m
from dlctl.wire.machine import Peer

HELD_FETCHES_MAX = 8
"""Reads of one worker that wait for a clock or a push. A newer one replaces the oldest."""
AnyFetch = m.Fetch | m.FetchRows
_Key = tuple[int, int]


class HeldFetches:
    def __init__(self) -> None:
        self._all: dict[_Key, tuple[Peer, AnyFetch]] = {}
        """(slot, number of the request) -> a read."""
        self._of: dict[int, list[_Key]] = {}
        """Slot -> its keys, in the same order."""

    def hold(self, peer: Peer, fetch: AnyFetch) -> None:
        key = fetch.slot, fetch.request
        own = self._of.setdefault(fetch.slot, [])
        if key not in self._all:
            own.append(key)
        self._all[key] = peer, fetch
        for oldest in own[:-HELD_FETCHES_MAX]:
            self._drop(oldest)

    def forget(self, slot: int) -> None:
        """A new process has the slot."""
        for key in self._of.pop(slot, ()):
            del self._all[key]

    def take(
        self, may_answer: Callable[[AnyFetch], bool], slot: int | None = None
    ) -> Iterator[tuple[Peer, AnyFetch]]:
        """Those that may be answered now: of this slot, or of all."""
        for key in list(self._all) if slot is None else list(self._of.get(slot, ())):
            peer, fetch = self._all[key]
            if may_answer(fetch):
                self._drop(key)
                yield peer, fetch

    def _drop(self, key: _Key) -> None:
        del self._all[key]
        self._of[key[0]].remove(key)
