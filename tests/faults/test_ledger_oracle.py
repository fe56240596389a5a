"""The judge of the fault tests is judged: it sees every loss and every repetition."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest

from dlctl.runs.acks import AckRecord

from . import on_parties
from .__main__ import chosen, table
from .job import PREFIX, processes_of
from .ledger import Block, Verdict, cell_of, judge
from .rows import ROWS, Result, try_row
from .watch import Watch

BLOCK_CELLS = 4
SHARDS, CELLS = 2, 32
BLOCKS = [
    Block(slot=0, incarnation=1, pid=100, number=0, first=0),
    Block(slot=1, incarnation=1, pid=101, number=0, first=4),
    Block(slot=0, incarnation=1, pid=100, number=1, first=8),
    Block(slot=0, incarnation=2, pid=102, number=0, first=12),
]
"""worker-0 was killed once; its first incarnation took a second block."""
ACKS = [AckRecord(0, 1, 5, (6, 6)), AckRecord(0, 2, 7, (2, 1)), AckRecord(1, 1, 6, (3, 4))]


def applied() -> np.ndarray:
    """The weights of a run in which everything acknowledged was applied, and one push more."""
    weights = np.zeros((SHARDS, CELLS), np.float32)
    cells = cell_of(BLOCKS, BLOCK_CELLS)
    for record in ACKS:
        for shard, count in enumerate(record.counts):
            weights[shard, cells[record.slot, record.incarnation][:count]] = 1
    weights[0, cells[0, 1][6]] = 1  # it was under way when its worker was killed
    return weights


def verdict(weights: np.ndarray) -> Verdict:
    return judge(weights.ravel(), SHARDS, BLOCKS, BLOCK_CELLS, ACKS)


def test_the_nth_gradient_of_a_process_has_a_cell_of_its_own() -> None:
    cells = cell_of(BLOCKS, BLOCK_CELLS)
    assert cells[0, 1].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert cells[0, 2].tolist() == [12, 13, 14, 15]


def test_a_run_in_which_nothing_is_lost_is_good() -> None:
    assert verdict(applied()) == Verdict(acknowledged=22, lost=0, twice=0, applied=13, strange=0)


@pytest.mark.parametrize("seed", range(20))
def test_every_loss_is_found_on_its_shard(seed: int) -> None:
    rng = random.Random(seed)
    weights = applied()
    record = rng.choice(ACKS)
    shard = rng.randrange(SHARDS)
    nth = rng.randrange(record.counts[shard])
    weights[shard, cell_of(BLOCKS, BLOCK_CELLS)[record.slot, record.incarnation][nth]] = 0
    assert verdict(weights).lost == 1
    assert verdict(weights).twice == 0


@pytest.mark.parametrize("seed", range(20))
def test_every_repetition_is_found_also_of_what_was_never_acknowledged(seed: int) -> None:
    weights = applied()
    there = np.argwhere(weights > 0)
    shard, cell = there[random.Random(seed).randrange(len(there))]
    weights[shard, cell] = 2
    assert verdict(weights).twice == 1
    assert verdict(weights).lost == 0


def test_without_weights_everything_that_was_acknowledged_is_lost() -> None:
    assert verdict(np.zeros((SHARDS, CELLS), np.float32)).lost == 22


@pytest.mark.parametrize("value", [0.5, -1.0, np.nan, np.inf])
def test_what_is_no_count_is_strange(value: float) -> None:
    weights = applied()
    weights[1, 20] = value
    assert verdict(weights).strange >= 1


def test_two_processes_that_call_themselves_the_same_are_found() -> None:
    imposter = Block(slot=0, incarnation=2, pid=103, number=1, first=16)
    with pytest.raises(AssertionError, match=r"worker-0\.2 was 2 processes"):
        cell_of([*BLOCKS, imposter], BLOCK_CELLS)


PARTY_LINES = b"".join(
    on_parties.LINE.pack(slot, incarnation, 100 + slot, *rows)
    for slot, incarnation, rows in [(0, 1, range(8)), (1, 1, range(8, 16)), (2, 1, range(8)),
                                    (2, 2, range(8, 16))]
)  # fmt: skip
PARTY_ACKS = [AckRecord(0, 1, 5, (1, 0)), AckRecord(2, 1, 6, (0, 1)), AckRecord(2, 2, 7, (0, 1))]


@pytest.mark.parametrize(
    ("part", "sample", "count", "expected"),
    [
        (0, 0, 1, Verdict(acknowledged=3, lost=0, twice=0, applied=2, strange=0)),
        (0, 3, 0, Verdict(acknowledged=3, lost=1, twice=0, applied=1, strange=0)),
        (0, 9, 0, Verdict(acknowledged=3, lost=0, twice=0, applied=1, strange=0)),
        (1, 9, 0, Verdict(acknowledged=3, lost=1, twice=0, applied=2, strange=0)),
        (1, 9, 2, Verdict(acknowledged=3, lost=0, twice=1, applied=2, strange=0)),
        (1, 20, 1, Verdict(acknowledged=3, lost=0, twice=0, applied=2, strange=1)),
    ],
)
def test_the_parts_of_two_parties_are_judged_each(
    part: int, sample: int, count: int, expected: Verdict
) -> None:
    """worker-1 has had no ack for its batch."""
    weights = np.zeros((2, 24), np.float32)
    weights[:, :16] = 1
    weights[part, sample] = count
    assert on_parties.judge(weights.ravel(), PARTY_LINES, PARTY_ACKS) == expected


def test_gaps_are_those_of_each_slot_and_count_to_the_end() -> None:
    watch = Watch()
    watch._changes = [
        (t, (slot, 1), (1, 1)) for t, slot in [(0.9, 0), (1.2, 1), (1.5, 0), (2.4, 1)]
    ]
    assert watch.longest_gap_s([0], 1.0, 3.0) == pytest.approx(1.5)
    assert watch.longest_gap_s([1], 1.0, 3.0) == pytest.approx(1.2)
    assert watch.longest_gap_s([0, 1], 1.3, 1.4) == pytest.approx(0.5)
    assert watch.longest_gap_s([2], 1.0, 3.0) == pytest.approx(2.0)


def test_only_names_rows_by_patterns() -> None:
    assert {row.name for row in chosen("worker-k*, agent-kill")} == {"agent-kill", "worker-kill"}
    assert {row.name for row in chosen("")} == set(ROWS)
    with pytest.raises(SystemExit, match="no row is named nonsense"):
        chosen("nonsense")


def test_a_row_that_is_skipped_says_why_and_is_neither_good_nor_bad() -> None:
    skipped = Result("net-reset", "…", 1, 20, skipped="not root")
    assert not skipped.is_good
    assert table([skipped]).splitlines()[-1].endswith("skipped: not root")


@pytest.mark.long
def test_a_real_run_that_is_killed_altogether_has_kept_what_it_acknowledged() -> None:
    """The whole way once: processes, torch, sockets, acks, states, the ledger; nothing is left."""
    result = try_row(ROWS["all-kill-states"], times=1, seed=4)
    assert result.problems == []
    assert result.verdict.acknowledged > 10
    assert (result.verdict.lost, result.verdict.twice) == (0, 0)
    mine = f"{PREFIX}{os.getpid()}-"
    assert processes_of(mine) == []
    assert not [*Path(tempfile.gettempdir()).glob(f"{mine}*")]
