"""Optimisers that compute with whole matrices, such as Muon, SOAP and Shampoo.

A two-dimensional parameter is on one server, never divided (`dlctl/model/cut.py`). Its rule is
called once per update, with all of it, and may keep arrays of any shape beside it: they survive
with the shard, are in its checkpoints, and go wherever the matrix goes when a run resumes with
another number of servers. Everything else has a rule of elements (`MatrixOptimizer.rest`).

An update is one block of all elements: a sparse push is made dense, with zeros. It is not
bit-identical on all machines, as matrix products and decompositions are rounded differently: a
journal has its results.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from annotated_types import Ge, Lt

from dlctl.job.config import STRICT, ParameterGroup
from dlctl.job.settings import Setting
from dlctl.model import parameter_groups
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.model.vector import all_finite
from dlctl.optim.base import LEARNING_RATE
from dlctl.optim.blocks import Block, Rule
from dlctl.util.numeric_limits import LearningRate, WeightDecay
from dlctl.util.threads import BLOCK
from dlctl.wire.messages import Array, Json

UPDATES = "updates"
Decay = Annotated[float, Ge(0), Lt(1)]
Shapes = Mapping[str, tuple[int, int]]
_HUGE = np.full(1, np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeOptions:
    __pydantic_config__ = STRICT

    lr: LearningRate = 0.001
    """Learning rate of matrices. Changes live."""
    weight_decay: WeightDecay = 0.0
    """w shrinks by lr times this at each update, which is at most 1."""
    elementwise: tuple[str, ...] = ()
    """Patterns of the names of matrices that are stepped as all else, such as embeddings."""


class Whole(NamedTuple):
    """A matrix at an update. All arrays are float32 and read-only."""

    entry: TensorEntry
    w: Array
    """[m, n], as the next two."""
    g: Array
    slots: Mapping[str, Array]
    kept: Mapping[str, Array]
    """What the rule keeps beside it, of the shapes of `shapes`; zeros before its first update."""
    lr: float
    weight_decay: float
    number: int
    """Which update of the shard this is, from 1 on."""


class Next(NamedTuple):
    """The values after an update; what is missing does not change."""

    w: Array
    slots: Mapping[str, Array]
    kept: Mapping[str, Array]


class _Piece(NamedTuple):
    """The part of a tensor that is on the shard: elements [lo, hi) of that."""

    entry: TensorEntry
    lo: int
    hi: int
    kept: Mapping[str, tuple[int, int]]
    """Where its kept arrays are in those of the shard."""
    lr_scale: float
    weight_decay: float


class KeptRange(NamedTuple):
    """The part of a shard in all kept arrays of one name, concatenated in the layout's order."""

    lo: int
    hi: int
    size: int


class MatrixOptimizer(ABC):
    """An optimiser that was not placed on a shard knows no matrices: its rule is `rest`."""

    Options: ClassVar[type[Any]] = WholeOptions
    live: ClassVar[Mapping[str, Setting]] = {"lr": LEARNING_RATE}
    WARMUP: ClassVar[int] = 0
    """Updates at the start that step nothing."""

    def __init__(self, options: WholeOptions, *slots: str) -> None:
        """slots: those of a matrix, and of all else, zeros at first."""
        self.options = options
        self.lr = options.lr
        self.slots: Mapping[str, float] = dict.fromkeys(slots, 0.0)
        self.counters: Json = {UPDATES: 0}
        self.kept: Mapping[str, KeptRange] | None = None
        """Name -> the kept arrays of the shard; None: it is not placed on one."""
        self._pieces: list[_Piece] = []

    # ------------------------------------------------------------ for the kind

    def is_matrix(self, entry: TensorEntry) -> bool:
        """Whether a tensor is stepped as a matrix, unless the options name it."""
        return len(entry.shape) == 2 and min(entry.shape) > 1

    def shapes(self, entry: TensorEntry) -> Shapes:
        """Name -> shape of the arrays that are kept beside this matrix."""
        return {}

    @abstractmethod
    def step(self, at: Whole) -> Next:
        """One update of a matrix."""

    @abstractmethod
    def rest(self, lr_scale: float, weight_decay: float, number: int) -> Rule:
        """The rule of everything else for the shard's update of this number, from 1 on. lr_scale:
        of its group of parameters."""

    def remarks(self) -> list[str]:
        """What a user should know about the matrices of this shard, a sentence each."""
        return []

    # ------------------------------------------------------------ its place

    def is_whole(self, entry: TensorEntry) -> bool:
        """Whether it is stepped as a matrix, so that one server must have all of it."""
        return self.is_matrix(entry) and not self.is_left(entry)

    def is_left(self, entry: TensorEntry) -> bool:
        """Whether the options name it as one that is no matrix."""
        names = (entry.name, *entry.aliases)
        return any(fnmatchcase(n, p) for n in names for p in self.options.elementwise)

    def place(
        self, layout: Layout, lo: int, hi: int, groups: Sequence[ParameterGroup] = ()
    ) -> None:
        """Step the elements [lo, hi) of this model from now on."""
        ends: dict[str, int] = {}
        ranges: dict[str, list[int]] = {}
        chosen = parameter_groups.of_each(groups, layout)
        for (entry, begin, end), group in zip(layout.slices(TRAINED), chosen, strict=True):
            own = {}
            here = max(begin, lo) < min(end, hi)
            for name, shape in self.shapes(entry).items() if self.is_whole(entry) else ():
                at = ends.get(name, 0)
                ends[name] = at + math.prod(shape)
                mine = ranges.setdefault(name, [])
                if here:
                    ranges[name] = [mine[0] if mine else at, ends[name]]
                    own[name] = at, ends[name]
            if here:
                decay = self.options.weight_decay
                if group is not None and group.weight_decay is not None:
                    decay = group.weight_decay
                scale = 1.0 if group is None else group.lr_scale
                cut = max(begin, lo) - lo, min(end, hi) - lo
                self._pieces.append(_Piece(entry, *cut, own, scale, decay))
        before = _before(self, layout, lo)
        self.kept = {}
        for name, mine in ranges.items():
            first, last = mine or [before[name]] * 2
            self.kept[name] = KeptRange(first, last, ends[name])

    def sweeps_next(self) -> bool:
        return self.kept is not None

    @property
    def entries(self) -> list[TensorEntry]:
        """The tensors of the shard."""
        return [piece.entry for piece in self._pieces]

    # ------------------------------------------------------------ updates

    def begin_update(self) -> Rule:
        self.counters[UPDATES] += 1
        number = self.counters[UPDATES]
        if self.kept is None:
            return self.rest(1.0, self.options.weight_decay, number)
        rates = {(p.lr_scale, p.weight_decay) for p in self._pieces}
        steps = number - self.WARMUP
        rests = {rate: self.rest(*rate, steps) if steps > 0 else _unchanged for rate in rates}

        def update(blocks: Iterable[Block]) -> None:
            for block in blocks:
                for piece in self._pieces:
                    if self.is_whole(piece.entry):
                        self._step_whole(piece, block, number)
                    else:
                        rule = rests[piece.lr_scale, piece.weight_decay]
                        rule(_parts(block, piece.lo, piece.hi))

        return update

    def _step_whole(self, piece: _Piece, block: Block, number: int) -> None:
        assert self.kept is not None and block.place.kept is not None  # noqa: PT018
        now, following = block.place.kept
        shapes, part = self.shapes(piece.entry), block.part(piece.lo, piece.hi)
        places = {
            name: slice(lo - self.kept[name].lo, hi - self.kept[name].lo)
            for name, (lo, hi) in piece.kept.items()
        }
        matrix = matrix_shape(piece.entry)
        at = Whole(
            piece.entry, part.w.reshape(matrix), part.g.reshape(matrix),
            {n: a.reshape(matrix) for n, a in zip(self.slots, part.slots, strict=True)},
            {n: now[n][cut].reshape(shapes[n]) for n, cut in places.items()},
            self.lr * piece.lr_scale, piece.weight_decay, number,
        )  # fmt: skip
        with np.errstate(all="ignore"):
            try:
                found = self.step(at)
            except np.linalg.LinAlgError:  # Of values that are not finite.
                found = Next(np.full_like(at.w, np.nan), {}, {})
        part.w_next[:] = found.w.ravel()
        for name, slot, slot_next in zip(self.slots, part.slots, part.slots_next, strict=True):
            slot_next[:] = found.slots.get(name, slot).ravel()
        for name, values in found.kept.items():
            following[name][places[name]] = values.ravel()
        if not all(map(_is_finite, (found.w, *found.slots.values(), *found.kept.values()))):
            np.multiply(_HUGE, _HUGE)  # Ring the alarm (`Alarm`): products of matrices do not.


def matrix_shape(entry: TensorEntry) -> tuple[int, int]:
    """That of a tensor as a matrix: its first dimension, and all others together."""
    return entry.shape[0], math.prod(entry.shape[1:])


def _is_finite(values: Array) -> bool:
    return all_finite(values.ravel())


def _before(optimizer: MatrixOptimizer, layout: Layout, lo: int) -> dict[str, int]:
    """The kept elements of each name before element `lo` of the model."""
    found: dict[str, int] = {}
    for entry, _, end in layout.slices(TRAINED):
        for name, shape in optimizer.shapes(entry).items() if optimizer.is_whole(entry) else ():
            found[name] = found.get(name, 0) + (math.prod(shape) if end <= lo else 0)
    return found


def _parts(block: Block, lo: int, hi: int) -> Iterable[Block]:
    return (block.part(at, min(at + BLOCK, hi)) for at in range(lo, hi, BLOCK))


def _unchanged(blocks: Iterable[Block]) -> None:
    """Nothing changes."""
    for block in blocks:
        block.w_next[:] = block.w
        for slot, following in zip(block.slots, block.slots_next, strict=True):
            following[:] = slot


def kept_of(optimizer: Any) -> Mapping[str, KeptRange] | None:
    """What an optimiser keeps beside matrices; None: its updates are of elements."""
    while (inner := getattr(optimizer, "inner", None)) is not None:
        optimizer = inner
    return optimizer.kept if isinstance(optimizer, MatrixOptimizer) else None
