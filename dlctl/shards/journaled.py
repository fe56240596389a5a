"""`durability = "disk"`: plain arrays, and every commit in a journal before it is acknowledged.

A commit is a record of its updates as they were pushed, and of the optimiser's learning rate,
counters and state: a copy, so further updates may follow before it is written. Recovery loads the
newest base, a snapshot of everything, and replays the updates of the journal; the rules are pure,
so the result is identical bit for bit. A rule of matrices is not: a record has its results. When
the journal is larger than a few states (or than `JOURNAL_BYTES_MIN`, which takes no time to
replay), a new base is written and the journal starts over. So a base costs a fraction of the
records before it, even if each record is as large as the state; recovery replays a bounded journal;
and the disk holds at most about six states. A base is a copy, too: until it is written, the memory
holds the state twice, as it does while a checkpoint is saved. Therefore the caller defers it while
another one is under way (`may_rotate`).

A server that opens a log writes a new base, into new files. After a failed sync the kernel may
consider pages clean that were never written: data that was read may not be on the disk, and
another sync of the same file would not report that. Everything since the new base is durable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from dlctl.compress.base import Delta
from dlctl.errors import DlctlError
from dlctl.optim.base import Optimizer
from dlctl.optim.blocks import Rule
from dlctl.shards import journal_format
from dlctl.shards.base import (
    FLOAT32_MAX,
    NOTHING,
    Extras,
    Spec,
    check_state,
    is_natural,
    no_point,
    not_replaced,
    unusable,
)
from dlctl.shards.errors import Unusable
from dlctl.shards.journal_format import Bytes, JournalRecord
from dlctl.shards.log import LogWrite, Point, ShardLog
from dlctl.shards.memory import ArraysInMemory, fresh_of
from dlctl.wire.messages import Array, Json

FORMAT = 5
JOURNAL_STATES = 4
"""Size of a journal that is started over, in states."""
JOURNAL_BYTES_MIN = 1 << 20
"""A smaller journal is not started over: a base and its two syncs cost more than its replay."""


class Journaled(ArraysInMemory):
    """The arrays of one shard in memory, with a log of their updates."""

    survives = True

    def __init__(
        self,
        log: ShardLog,
        spec: Spec,
        point: Point = no_point,
        journal_bytes_min: int = JOURNAL_BYTES_MIN,
    ) -> None:
        """For an existing log, which `resume` reads. journal_bytes_min: a smaller journal is never
        started over.
        """
        super().__init__(fresh_of(spec), takes_matrices=spec.kept is not None)
        self._dtype = np.dtype(spec.dtype).newbyteorder("<").str
        self._log = log
        self._spec = spec
        self._point = point
        self._number = 0
        self._deltas: list[tuple[Delta, float, Mapping[str, int]]] = []
        """Updates since the last commit."""
        self._has_results = False
        """Whether there were updates of matrices since: then a record has their results."""
        self._was_filled = False
        self._is_uncertain = False
        """Whether the content of the log is unknown, because it could not be rewritten. Then the
        next commit writes a base."""
        self._updated = False
        """Whether there was an update since the values were set."""
        self._state: Json = {}
        """The role's state in the last commit."""
        self._journal_bytes = 0
        """Size of the records since the last base."""
        self._journal_bytes_min = journal_bytes_min
        self._rotate_at_bytes = self._journal_bytes_max()

    @staticmethod
    def create(
        log: ShardLog,
        spec: Spec,
        point: Point = no_point,
        journal_bytes_min: int = JOURNAL_BYTES_MIN,
    ) -> Journaled:
        """A new state that replaces everything in the log.

        Raises Unusable if the log holds a state of this run with committed updates, unless the spec
        allows to replace it.
        """
        storage = Journaled(log, spec, point, journal_bytes_min)
        if not spec.replaces and storage._has_updates():
            raise not_replaced(spec, log.where)
        # Above all existing numbers: until those are removed, this base must be the newest.
        storage._number = max(log.bases(), default=-1) + 1
        storage._write_base()
        return storage

    def update(
        self, delta: Delta, rule: Rule, lr: float, counters: Mapping[str, int] = NOTHING
    ) -> None:
        if self._takes_matrices:
            self._has_results = True
        else:
            self._deltas.append((delta, lr, counters))
        self._updated = True
        super().update(delta, rule, lr)

    def fill(self, vectors: Mapping[str, Array], extras: Extras | None) -> None:
        super().fill(vectors, extras)
        self._was_filled, self._updated = True, False

    # ------------------------------------------------------------ writing

    def commit(self, state: Json, *, may_rotate: bool = True) -> LogWrite:
        self._point("commit begun")
        self._number += 1
        self._state = state
        record = base = b""
        if not (self._was_filled or self._is_uncertain):
            record = b"".join(self._record())
            self._journal_bytes += len(record)
        is_long = self._journal_bytes > self._rotate_at_bytes
        if not record or (is_long and may_rotate):
            # If there is no room for it, the next attempt is as many records later.
            base, self._journal_bytes = b"".join(self._base()), 0
        self._deltas, self._was_filled, self._is_uncertain = [], False, False
        self._has_results = False
        return LogWrite(self._log, self._number, record, base, self._point)

    def rewrite(self) -> None:
        """Write everything again, into new files; the old ones may be gone. No write may be under
        way.

        Uncommitted updates are left to their commit, which then writes everything. If this fails,
        the caller may continue: the next commit writes everything, or fails, too.
        """
        self._is_uncertain = True
        if not self._deltas and not self._has_results and not self._was_filled:
            self._number += 1
            self._write_base()

    def close(self) -> None:
        """Write a last record, so that damage before it is distinguished from a truncated end. No
        write may be under way.
        """
        has_changed = self._deltas or self._has_results or self._was_filled
        if has_changed or self._is_uncertain or not self._state:
            return
        self._number += 1
        with suppress(DlctlError):  # The last commit is what counts, and it is on the disk.
            self._log.append(self._record())

    def _record(self) -> list[Bytes]:
        arrays: list[Array] = []
        updates: list[list[Any]] = []
        for (values, indices, _), lr, counters in self._deltas:
            arrays += [values] if indices is None else [values, indices]
            updates.append(
                [values.size, indices is not None, lr, *([dict(counters)] if counters else [])]
            )
        body: Json = {"state": self._state, "updates": updates}
        if self._has_results:
            body, arrays = {**body, "results": True}, [*self._vectors.values()]
        return journal_format.pack(self._number, body, arrays)

    def _base(self) -> list[Bytes]:
        body = {**self._identity(), "state": self._state, "updated": self._updated}
        body["extras"] = self.extras.averaged.size
        return journal_format.pack(
            self._number, body, [*self._vectors.values(), self.extras.averaged]
        )

    def _write_base(self) -> None:
        """Between two commits: when this returns, it is on the disk."""
        self._is_uncertain = True
        self._log.begin(self._number, self._base())
        self._is_uncertain, self._journal_bytes = False, 0
        self._point("base written")

    def _identity(self) -> Json:
        spec = self._spec
        return {
            "format": FORMAT,
            "run_id": spec.run_id,
            "shard": spec.shard,
            "table": spec.table,
            "dtype": spec.dtype,
            "elements": [spec.lo, spec.hi],
            "slots": list(spec.slots),
            **({"kept": dict(spec.kept)} if spec.kept else {}),
        }

    def _journal_bytes_max(self) -> int:
        state_bytes = sum(array.nbytes for array in self._vectors.values())
        return max(JOURNAL_STATES * state_bytes, self._journal_bytes_min)

    # ------------------------------------------------------------ reading

    def resume(self, optimizer: Optimizer) -> Json:
        try:
            return self._resume(optimizer)
        except Unusable as error:
            raise unusable(self._spec, error, self._log.where) from error

    def _resume(self, optimizer: Optimizer) -> Json:
        number, base = self._newest_base()
        self._take_base(base)
        self._state = check_state(base.body.get("state"), optimizer)
        _load_optimizer(optimizer, self._state)
        self._number = number
        for record in journal_format.read_each(self._log.read_journal(number)):
            self._state = self._repeat(record, optimizer)
        self._number += 1
        self._write_base()
        return self._state

    def _has_updates(self) -> bool:
        """Whether the log has a state of this shard with committed updates."""
        try:
            number, base = self._newest_base()
        except Unusable:
            return any(map(self._has_journal, self._log.bases()))
        identity = self._identity()
        if any(base.body.get(key) != identity[key] for key in ("run_id", "shard", "table")):
            return False
        if base.body.get("updated"):
            return True
        try:
            found = journal_format.read_each(self._log.read_journal(number))
            return any(r.body.get("updates") or r.body.get("results") for r in found)
        except Unusable:
            return True  # It is damaged, and has records behind the damage.

    def _has_journal(self, number: int) -> bool:
        return any(self._log.read_journal(number))

    def _newest_base(self) -> tuple[int, JournalRecord]:
        """A damaged base without records in its journal is ignored: the base before it is removed
        only when the newer one is on the disk, and its journal reaches as far."""
        numbers = self._log.bases()
        for number in numbers:
            found = journal_format.read(self._log.read_base(number))
            if found is not None and found[0].number == number:
                return number, found[0]
            if self._has_journal(number):
                raise Unusable(f"its base {number} is damaged, and its journal depends on that")
        raise Unusable(f"its base {numbers[0]} is damaged" if numbers else "there is none")

    def _take_base(self, base: JournalRecord) -> None:
        wanted = self._identity()
        for what in {**wanted, "kept": None}:
            journal_format.same(base.body.get(what), wanted.get(what), what)
        averaged = base.body.get("extras")
        if type(averaged) is not int or averaged < 0:
            raise Unusable("it does not state the size of its averaged buffers")
        *vectors, mean = base.arrays([*self._shapes(), ("<f8", averaged)])
        super().fill(dict(zip(self._vectors, vectors, strict=True)), Extras(mean))
        self._updated = bool(base.body.get("updated"))

    def _repeat(self, record: JournalRecord, optimizer: Optimizer) -> Json:
        """Replay the updates of one commit from the journal."""
        if record.number != self._number + 1:
            raise Unusable(f"record {record.number} of its journal follows {self._number}")
        self._number = record.number
        state = check_state(record.body.get("state"), optimizer)
        if not state:
            raise Unusable(f"record {record.number} of its journal has no state")
        updates = record.body.get("updates")
        if type(updates) is not list or not all(map(_is_update, updates)):
            raise Unusable(f"record {record.number} of its journal has no list of updates")
        if record.body.get("results"):
            vectors = record.arrays(self._shapes())
            super().fill(dict(zip(self._vectors, vectors, strict=True)), None)
            optimizer.counters.update(state["counters"])
            self._updated = True
        for delta, lr, counters in self._deltas_of(record, updates):
            if not counters.keys() <= optimizer.counters.keys():
                raise Unusable(f"record {record.number} of its journal is of another optimiser")
            optimizer.lr = lr
            optimizer.counters.update(counters)
            super().update(delta, optimizer.begin_update(), lr)
            self._updated = True
        optimizer.lr = state["lr"]
        if optimizer.counters != state["counters"]:
            raise Unusable(f"replaying record {record.number} of its journal gives other counters")
        return state

    def _shapes(self) -> list[tuple[str, int]]:
        return [(self._dtype, array.size) for array in self._vectors.values()]

    def _deltas_of(
        self, record: JournalRecord, updates: list[Any]
    ) -> Iterator[tuple[Delta, float, Json]]:
        """The updates of a commit as they were pushed, their learning rates, and the counters set
        for them. updates: [elements, whether it has indices, rate, optional counters] each.
        """
        shapes = [
            shape
            for count, is_sparse, *_ in updates
            for shape in [(self._dtype, count), *([("<i8", count)] if is_sparse else [])]
        ]
        arrays = record.arrays(shapes)
        for _, is_sparse, lr, *counters in updates:
            values = next(arrays)
            indices = next(arrays) if is_sparse else None
            if not _fits(values, indices, self._spec.size):
                raise Unusable(f"record {record.number} of its journal is for another shard")
            yield Delta(values, indices), lr, counters[0] if counters else {}


def _fits(values: Array, indices: Array | None, size: int) -> bool:
    """Whether an update fits a shard of `size` elements."""
    if indices is None:
        return values.size == size
    is_inside = not indices.size or bool(indices[0] >= 0 and indices[-1] < size)
    return is_inside and bool(np.all(indices[1:] > indices[:-1]))


def _is_update(value: Any) -> bool:
    """Whether a value is [elements, whether it has indices, rate, optional counters]."""
    if type(value) is not list or len(value) not in (3, 4):
        return False
    is_well_formed = len(value) == 3 or (
        type(value[3]) is dict and all(map(is_natural, value[3].values()))
    )
    return is_well_formed and type(value[2]) in (int, float) and abs(value[2]) <= FLOAT32_MAX


def _load_optimizer(optimizer: Optimizer, state: Json) -> None:
    if state:
        optimizer.lr = state["lr"]
        optimizer.counters.update(state["counters"])
