"""The judge: final weights that are counts, against what the workers had been told.

`lost` is a gradient that a shard acknowledged and does not have, `twice` one that a shard has more
than once. Both are counted per shard. Nothing here asks a log, a metric or a daemon.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlctl.runs.acks import AckRecord

LINE = struct.Struct("<QQQQ")
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Block:
    """Cells [first, first + cells) hold the gradients `number * cells` and on of one process."""

    slot: int
    incarnation: int
    pid: int
    number: int
    first: int


@dataclass(frozen=True, slots=True)
class Verdict:
    acknowledged: int
    """Over all shards."""
    lost: int
    twice: int
    applied: int
    """Different gradients that are in at least one shard."""
    strange: int
    """Cells that hold no count at all, or that nobody had been given."""

    def __add__(self, other: Verdict) -> Verdict:
        mine, others = _numbers(self), _numbers(other)
        return Verdict(*(a + b for a, b in zip(mine, others, strict=True)))


def _numbers(verdict: Verdict) -> tuple[int, ...]:
    return (
        verdict.acknowledged, verdict.lost, verdict.twice, verdict.applied, verdict.strange
    )  # fmt: skip


NOTHING = Verdict(0, 0, 0, 0, 0)


def read_blocks(path: Path, block_cells: int) -> list[Block]:
    data = path.read_bytes()
    lines = LINE.iter_unpack(data[: len(data) - len(data) % LINE.size])
    return [
        Block(slot, incarnation, pid, number, i * block_cells)
        for i, (slot, incarnation, pid, number) in enumerate(lines)
    ]


def cell_of(blocks: Iterable[Block], block_cells: int) -> dict[tuple[int, int], Array]:
    """(slot, incarnation) -> int64[n], the cell of its n-th gradient.

    Raises AssertionError if two processes said that they were the same incarnation.
    """
    found: dict[tuple[int, int], dict[int, Block]] = {}
    for block in blocks:
        mine = found.setdefault((block.slot, block.incarnation), {})
        pids = {other.pid for other in mine.values()} | {block.pid}
        assert len(pids) == 1, f"worker-{block.slot}.{block.incarnation} was {len(pids)} processes"
        mine[block.number] = block
    return {
        who: np.concatenate(
            [np.arange(b.first, b.first + block_cells) for _, b in sorted(mine.items())]
        )
        for who, mine in found.items()
    }


def judge(
    weights: Array, shards: int, blocks: list[Block], block_cells: int, acks: Iterable[AckRecord]
) -> Verdict:
    """`weights` float32[shards * cells]: the final parameters, zeros where nothing is known.

    The n-th push of an incarnation holds its n-th gradient (Downpour with push_every_steps = 1 and
    no compression), so an acknowledged push names its cell.
    """
    counts = weights.reshape(shards, -1)
    cells = cell_of(blocks, block_cells)
    acknowledged = lost = 0
    for record in acks:
        mine = cells[record.slot, record.incarnation]
        for shard, count in enumerate(record.counts):
            assert count <= len(mine), f"{record} was told of more pushes than it made gradients"
            acknowledged += count
            lost += int((counts[shard][mine[:count]] == 0).sum())
    whole = np.isfinite(counts) & (counts == np.round(counts)) & (counts >= 0)
    given = len(blocks) * block_cells
    return Verdict(
        acknowledged=acknowledged,
        lost=lost,
        twice=int((counts[whole] > 1).sum()),
        applied=int((counts > 0).any(axis=0).sum()),
        strange=int((~whole).sum()) + int((counts[:, given:] != 0).sum()),
    )
