"""Reads: values of the servers' tables, into the model between two steps or beside it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dlctl.algorithms.base import ReplicaSide, Shape
from dlctl.algorithms.needs import Range, Read, View
from dlctl.roles.worker.fetching import Fetched, Fetcher
from dlctl.roles.worker.intervals import FETCH, Pacing
from dlctl.roles.worker.services.base import Phase, check_ranges


class Reading:
    """One read into the model at a time: an older slice must not come over a newer one. A read that
    is begun while another one is under way is answered by that one only if it asks for no less, and
    else asked behind it.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        side: ReplicaSide,
        shape: Shape,
        pacing: Pacing,
        own_writes_settled: Callable[[int], bool],
    ) -> None:
        """own_writes_settled: whether nothing that was pushed to a table is under way."""
        self.fetcher = fetcher
        self.side = side
        self.shape = shape
        self.pacing = pacing
        self.own_writes_settled = own_writes_settled
        self.has_parameters = False
        """Whether anything has been read into the model yet; without it nothing is computed."""
        self._need: Read | None = None
        self._table = 0
        self._is_asked = False
        self._placing: list[Fetched] = []
        """Of the read into the model that is under way; one for each range."""
        self._at_least = 0
        """The clock that it waits for."""
        self._beside: list[Fetched] = []
        self._result: View | None = None

    # ------------------------------------------------------------ the service

    def begin(self, need: Read, now: float) -> None:
        """Raises ValueError for what cannot be read like that."""
        self._table = self.shape.table(need.table)
        check_ranges(need.ranges, self.fetcher.tables[self._table][-1].hi)
        if self._table and need.into == "model":
            raise ValueError(f'table "{need.table}" is read beside the model')
        if need.into == "beside" and not need.wait:
            raise ValueError("what is read beside the model is waited for")
        self._need, self._is_asked, self._result = need, False, None

    def poll(self, now: float) -> tuple[bool, View | None]:
        need = self._need
        assert need is not None
        if not self._is_asked and not self._ask(need, now):
            self._stands_still(need, now)
            return False, None
        done = self._has_come(need)
        if not done:
            self._stands_still(need, now)
            return False, None
        self.pacing.waits("", now)
        self._need = None
        return True, self._result if need.wait else None

    def _stands_still(self, need: Read, now: float) -> None:
        self.pacing.waits(FETCH if need.wait else "", now)

    def _has_come(self, need: Read) -> bool:
        if need.into == "beside":
            if any(not fetched.complete for fetched in self._beside):
                return False
            self._result = self._assembled()
            return True
        return not ((need.wait or not self.has_parameters) and self._placing)

    def _ask(self, need: Read, now: float) -> bool:
        """Whether it is on its way; else it waits for what is before it."""
        if need.after_own and not self.own_writes_settled(self._table):
            return False
        if need.into == "beside":
            whole: list[Range | None] = [None]
            self._beside = [
                self.fetcher.start(need.at_least, table=self._table, part=part, whole=True)
                for part in need.ranges or whole
            ]
        elif not self._placing:
            self._start(need, now)
        elif not self._serves(need):
            return False
        self._is_asked = True
        return True

    def _serves(self, need: Read) -> bool:
        """Whether the read that is under way is as good as a new one. It is if it is of the whole
        model, waits for no smaller clock, and was not begun before a push that has to be in it.
        """
        is_whole = all(fetched.part is None for fetched in self._placing) and not need.ranges
        return is_whole and self._at_least >= need.at_least and not need.after_own

    def _start(self, need: Read, now: float) -> None:
        self._at_least = need.at_least
        whole: list[Range | None] = [None]
        self._placing = [
            self.fetcher.start(need.at_least, table=self._table, part=part)
            for part in need.ranges or whole
        ]
        self.pacing.fetch_began(now, waits=need.wait)

    def phase(self) -> Phase:
        waited = self._beside if self._need and self._need.into == "beside" else self._placing
        late = {c.peer for f in waited for c in f.clients if c.shard not in f.clocks}
        if self._need is not None and not self._is_asked:
            return Phase("pushing before it fetches" if self._need.after_own else "fetching")
        return Phase("fetching", tuple(sorted(late)))

    def deadline(self) -> float | None:
        return None

    def cancel(self) -> None:
        self._need = None

    # ------------------------------------------------------------ arrivals

    def arrived(self, now: float) -> None:
        """All that was asked for may be here: the time that it took is measured."""
        if self._placing and all(fetched.complete for fetched in self._placing):
            self.pacing.fetched(now)

    def place(self) -> None:
        """Put what has come into the model. Never while a gradient is being computed: it would be
        of no parameters at all.
        """
        if not self._placing:
            return
        if any(fetched.slices for fetched in self._placing):
            self.side.settle()
        for fetched in self._placing:
            self.fetcher.place(fetched, self.side.parameters, self.side.placed)
        if all(fetched.complete for fetched in self._placing):
            placed, self._placing = self._placing, []
            views = [fetched.view() for fetched in placed]
            view = View(min(v.clock_min for v in views), max(v.clock_max for v in views))
            self.side.view = self._result = view
            self.has_parameters = True

    def _assembled(self) -> View:
        read, self._beside = self._beside, []
        views = [fetched.view() for fetched in read]
        values = np.concatenate([self.fetcher.assemble(fetched) for fetched in read])
        return View(min(v.clock_min for v in views), max(v.clock_max for v in views), values)
