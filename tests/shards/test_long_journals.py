"""When a journal is started over: what that costs, and what a recovery has to replay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dlctl import registry
from dlctl.compress.base import Delta
from dlctl.shards.base import Shard, Spec
from dlctl.shards.journal_format import Bytes
from dlctl.shards.journaled import JOURNAL_BYTES_MIN, JOURNAL_STATES, Journaled
from dlctl.sim.states import MemoryLog

SMALL, LARGE = 10_000, 400_000
"""Elements: 26 records of the small one are still shorter than any journal that is started over."""
HEADS = 1024
"""Bytes of a record besides its arrays, at most."""


class Counted(MemoryLog):
    """A log that counts what is written."""

    base_bytes = journal_bytes = longest = 0

    def begin(self, number: int, parts: Sequence[Bytes]) -> None:
        super().begin(number, parts)
        self.base_bytes += sum(map(len, parts))

    def append(self, parts: Sequence[Bytes]) -> None:
        super().append(parts)
        self.journal_bytes += sum(map(len, parts))
        self.longest = max(self.longest, len(self.files[self.current][1]))


def pushed(size: int, count: int, optimizer: str = "sgd") -> Counted:
    """The log of a shard behind so many dense pushes; another one finds it as it was."""
    log, kind = Counted(), registry.load("optimizers", optimizer)

    def opened(*, anew: bool) -> Shard:
        rule = kind(kind.Options())
        spec = Spec("run", 0, 0, size, rule.slots)
        return Shard(rule, Journaled.create(log, spec) if anew else Journaled(log, spec))

    shard = opened(anew=True)
    log.base_bytes = 0
    for number in range(count):
        shard.apply(Delta(np.full(size, 0.5 + number, np.float32)))
        shard.commit({})
    found = opened(anew=False)
    found.resume()
    assert found.w.tobytes() == shard.w.tobytes()
    return log


@pytest.mark.parametrize(("optimizer", "vectors"), [("sgd", 1), ("adagrad", 2)])
def test_a_base_costs_a_fraction_of_the_records_before_it(optimizer: str, vectors: int) -> None:
    """Although each record of a dense push is as large as the state of plain SGD."""
    log = pushed(LARGE, 30, optimizer)
    assert 0 < log.base_bytes <= log.journal_bytes / JOURNAL_STATES + vectors * 4 * LARGE + HEADS


def test_a_small_journal_is_not_started_over() -> None:
    log = pushed(SMALL, 26)
    assert log.longest < JOURNAL_BYTES_MIN
    assert log.base_bytes == 4 * SMALL + _head(log), "of the shard that found it"


@pytest.mark.parametrize(("size", "pushes"), [(SMALL, 60), (LARGE, 12)])
def test_what_a_recovery_replays_is_bounded(size: int, pushes: int) -> None:
    log = pushed(size, pushes)
    most = max(JOURNAL_BYTES_MIN, JOURNAL_STATES * 4 * size)
    assert most < log.longest <= most + 4 * size + HEADS


def _head(log: Counted) -> int:
    return len(log.read_base(log.current)) - 4 * SMALL
