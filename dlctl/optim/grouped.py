"""An optimiser whose rate and weight decay differ between parameters.

On a shard the parameters of a group are ranges of elements. A block of an update is split where
another group begins, and the optimiser of its group processes each piece. There is one for each
group, differing only in rate and decay, and all share one set of counters: for a storage they are
one optimiser.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from dlctl.job.config import ParameterGroup
from dlctl.job.settings import Setting
from dlctl.model.parameter_groups import GroupRun
from dlctl.optim.base import Optimizer, Sweeping
from dlctl.optim.blocks import Block, BlockPlace, Rule
from dlctl.wire.messages import Json

PIECES_MAX = 8
"""The largest number of pieces that a block is processed in. With more it is faster to copy those
of a group into one than to process each.
"""
Piece = tuple[int, int, int]
"""(group, lo, hi), elements of a block."""


class Grouped:
    Options: ClassVar[type[Any]] = object
    live: ClassVar[Mapping[str, Setting]] = {}

    def __init__(
        self, members: Sequence[Optimizer], scales: Sequence[float], runs: Sequence[GroupRun]
    ) -> None:
        """members: optimisers of one kind, the first at its full rate; scales: factors of their
        rates. runs: all elements of the shard; `GroupRun.group` is the number of the member.
        """
        self._members = members
        self._scales = scales
        self._ends = np.array([run.end for run in runs], np.int64)
        self._groups = [run.group for run in runs]
        self.slots: Mapping[str, float] = members[0].slots
        self.counters: Json = members[0].counters
        for member in members:
            member.counters = self.counters

    @property
    def lr(self) -> float:
        """The learning rate before the groups' factors."""
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self._lr = lr
        for member, scale in zip(self._members, self._scales, strict=True):
            member.lr = lr * scale

    def sweeps_next(self) -> bool:
        first = self._members[0]
        return isinstance(first, Sweeping) and first.sweeps_next()

    def begin_update(self) -> Rule:
        before, rules = dict(self.counters), []
        for member in self._members:
            self.counters.update(before)
            rules.append(member.begin_update())

        def each_by_its_own(blocks: Iterable[Block]) -> None:
            for block in blocks:
                pieces = list(self._pieces(block))
                if len(pieces) <= PIECES_MAX:
                    for group, lo, hi in pieces:
                        rules[group]([block.part(lo, hi)])
                else:
                    _gathered(block, pieces, rules)

        return each_by_its_own

    def _pieces(self, block: Block) -> Iterator[Piece]:
        """All elements of a block, in their order."""
        (at, indices, _), size = block.place, block.w.size
        ends = (at, at + size - 1) if indices is None else (indices[0], indices[-1])
        first, last = np.searchsorted(self._ends, ends, side="right").tolist()
        bounds = self._ends[first:last]
        cuts = bounds - at if indices is None else np.searchsorted(indices, bounds)
        lo = 0
        for group, hi in zip(self._groups[first : last + 1], [*cuts.tolist(), size], strict=True):
            if lo < hi:
                yield group, lo, hi
            lo = hi


def _gathered(block: Block, pieces: Sequence[Piece], rules: Sequence[Rule]) -> None:
    """Process all pieces of each group at once."""
    at, indices, _ = block.place
    for group in {group for group, _, _ in pieces}:
        where = np.concatenate([np.arange(lo, hi) for of, lo, hi in pieces if of == group])
        slots = tuple(slot[where] for slot in block.slots)
        place = BlockPlace(at, at + where if indices is None else indices[where])
        mine = Block.in_place(place, block.w[where], block.g[where], slots)
        rules[group]([mine])
        for following, values in zip(
            (block.w_next, *block.slots_next), (mine.w, *mine.slots), strict=True
        ):
            following[where] = values


def make(
    kind: type[Optimizer],
    options: Mapping[str, Any],
    groups: Sequence[ParameterGroup],
    runs: Sequence[GroupRun],
) -> Optimizer:
    """The optimiser of a shard. runs: `parameter_groups.runs` of it.

    If all elements are treated alike, as without groups, it is a plain optimiser.
    """
    plain = kind(kind.Options(**options))
    makes: list[tuple[float, Any]] = [(1.0, options.get("weight_decay"))]
    numbers = {-1: 0}
    for number in sorted({run.group for run in runs} - {-1}):
        group = groups[number]
        is_decayed = group.weight_decay is not None and "weight_decay" in options
        made = (group.lr_scale, group.weight_decay if is_decayed else options.get("weight_decay"))
        if made not in makes:
            makes.append(made)
        numbers[number] = makes.index(made)
    if not any(numbers[run.group] for run in runs):
        return plain
    members = [plain]
    for _, decay in makes[1:]:
        own = {"weight_decay": decay} if "weight_decay" in options else {}
        members.append(kind(kind.Options(**{**options, **own})))
    optimizer = Grouped(
        members,
        [scale for scale, _ in makes],
        [GroupRun(run.end, numbers[run.group]) for run in runs],
    )
    optimizer.lr = plain.lr
    return optimizer
