"""Reads: values of the servers' tables, into the model between two steps or beside it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from dlctl.algorithms.base import ReplicaSide
from dlctl.algorithms.needs import Range, Read, View
from dlctl.roles.worker.accounts import Accounts
from dlctl.roles.worker.fetching import Fetched, Fetcher
from dlctl.roles.worker.pacing import FETCH
from dlctl.roles.worker.services.base import Phase, Service, check_ranges, check_rows
from dlctl.roles.worker.services.handed_on import HandedOn
from dlctl.roles.worker.services.writing import Writing


@dataclass(slots=True)
class OneRead:
    """A read, queued or in flight."""

    table: int
    need: Read
    includes: int
    """The number of the last write that is in the values."""
    asked: list[Fetched] = field(default_factory=list)
    """One for each range; [] until it is in flight."""

    def is_here(self) -> bool:
        return bool(self.asked) and all(fetched.complete for fetched in self.asked)

    def serves(self, other: OneRead) -> bool:
        """Whether this read can replace `other`, a new one: both are of the whole model, and this
        one waits for no smaller clock and includes all required pushes.
        """
        mine, its = self.need, other.need
        is_whole = not mine.ranges and not its.ranges
        return is_whole and mine.at_least >= its.at_least and self.includes >= other.includes

    def is_alike(self, need: Read) -> bool:
        """Whether the need requests the same values as this read."""
        alike = replace(self.need, wait=need.wait, rows=None) == replace(need, rows=None)
        return alike and self.need.rows is need.rows

    def take_in(self, need: Read) -> None:
        """Merge another one into this one, which is not in flight yet."""
        mine = self.need
        is_whole = not mine.ranges or not need.ranges
        self.need = replace(
            mine,
            ranges=() if is_whole else tuple(dict.fromkeys((*mine.ranges, *need.ranges))),
            at_least=max(mine.at_least, need.at_least),
            after_own=mine.after_own or need.after_own,
            wait=mine.wait or need.wait,
        )

    def view(self) -> View:
        views = [fetched.view() for fetched in self.asked]
        return View(min(v.clock_min for v in views), max(v.clock_max for v in views))


class Reading(Service[Read]):
    """One read into the model at a time: an older slice must not overwrite a newer one. Reads
    requested meanwhile are merged into one that follows, unless the one in flight can serve them.
    """

    def __init__(
        self, fetcher: Fetcher, accounts: Accounts, writing: Writing, side: ReplicaSide
    ) -> None:
        self.fetcher, self.writing, self.side = fetcher, writing, side
        self.shape = writing.shape
        self.pacing, self.progress = accounts.pacing, accounts.progress
        self.handed_on: HandedOn | None = None
        """The model's buffers, which are read behind the parameters if replicas hand them on."""
        self.has_parameters = False
        """Whether anything was read into the model yet; before that nothing is computed."""
        self._need: Read | None = None
        self._placing: OneRead | None = None
        """The read into the model that is in flight."""
        self._queued: OneRead | None = None
        """The read that follows the one in flight."""
        self._beside: OneRead | None = None
        self._result: View | None = None

    # ------------------------------------------------------------ the service

    def begin(self, need: Read, now: float) -> None:
        """Begin a read, or queue it. Raises ValueError for an invalid one."""
        table = self.shape.table(need.table)
        check_ranges(need.ranges, self.fetcher.tables[table][-1].hi)
        if table and need.into == "model":
            raise ValueError(f'table "{need.table}" is read beside the model')
        check_rows(need.rows, self.fetcher.tables[table])
        self._need, self._result = need, None
        includes = self.writing.number if need.after_own else -1
        read = OneRead(table, need, includes)
        if need.into == "beside":
            if self._beside is None or not self._beside.is_alike(need):
                self._beside = read
                self._request(read, whole=True)
        elif self._queued is not None:
            self._queued.take_in(need)
        elif self._placing is None or not self._placing.serves(read):
            self._queued = read
        self.advance(now)

    def advance(self, now: float) -> None:
        """Send the queued read, if none is in flight."""
        if self._queued is not None and self._placing is None:
            self._placing, self._queued = self._queued, None
            self._request(self._placing, whole=False)
            self.pacing.fetch_began(now, waits=self._placing.need.wait)
        if self.handed_on is not None:
            self.handed_on.advance(now)

    def _request(self, read: OneRead, *, whole: bool) -> None:
        need, settled = read.need, self.writing.settled_until(read.table)
        read.includes = self.writing.number if need.after_own else settled
        parts: tuple[Range | None, ...] = need.ranges or (None,)
        read.asked = [
            self.fetcher.start(
                need.at_least,
                table=read.table,
                part=part,
                whole=whole,
                after_own=need.after_own,
                rows=need.rows,
            )
            for part in parts
        ]

    def poll(self, now: float) -> tuple[bool, View | None]:
        need = self._need
        assert need is not None
        if not self._is_done(need):
            self.pacing.waits(FETCH if need.wait else "", now)
            return False, None
        self.pacing.waits("", now)
        self._need = None
        return True, self._result if need.wait else None

    def _is_done(self, need: Read) -> bool:
        if need.into == "beside" and not need.wait:
            return True
        if need.into == "beside":
            assert self._beside is not None
            if not self._beside.is_here():
                return False
            read, self._beside = self._beside, None
            values = [
                self.fetcher.assemble(fetched, self.side.parameters) for fetched in read.asked
            ]
            joined = values[0] if len(values) == 1 else np.concatenate(values)
            self._result = read.view()._replace(values=joined)
            return True
        if self.handed_on is not None and self.handed_on.waits:
            return False
        waits = need.wait or not self.has_parameters
        return not waits or (self._placing is None and self._queued is None)

    def phase(self) -> Phase:
        return Phase("fetching")

    # ------------------------------------------------------------ arrivals

    def arrived(self, now: float) -> None:
        """Measure the time of the read into the model, if it is complete."""
        if self.is_here():
            self.pacing.fetched(now)

    def is_here(self) -> bool:
        """Whether a read into the model has arrived and is not in its place."""
        return self._placing is not None and self._placing.is_here()

    def place(self) -> None:
        """Place the received slices in the model. Never while a gradient is being computed: it
        would mix two versions of the parameters.
        """
        read = self._placing
        if read is None:
            return
        side = self.side
        for fetched in read.asked:
            self.fetcher.place(fetched, side.parameters, side.arrival)
        if read.is_here():
            self._placing = None
            self.side.view = self._result = read.view()
            self.has_parameters = True
            if self.handed_on is not None:
                self.handed_on.want(read.asked[0].request)
            self.progress.on_total(max(fetched.samples for fetched in read.asked))
