"""`durability = "none"`: plain arrays, updated in place, lost with their process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from dlctl.compress.base import Delta
from dlctl.optim.base import Optimizer
from dlctl.optim.blocks import Block, BlockPlace, KeptArrays, Rule, update_in_place
from dlctl.shards.base import KEPT, NOTHING, Extras, Shard, Spec, W
from dlctl.shards.errors import Unusable
from dlctl.wire.messages import Array, Json

if TYPE_CHECKING:
    from dlctl.shards.log import LogWrite


class ArraysInMemory:
    """The arrays of one shard in this process's memory."""

    survives = False

    def __init__(self, vectors: dict[str, Array], *, takes_matrices: bool = False) -> None:
        """`vectors`: "w" and the slots in the optimiser's order, float32[n] each, then what it
        keeps beside matrices; used as is. takes_matrices: an update is one block, of all elements.
        """
        self._vectors = vectors
        self._slots, self._kept = parted(vectors)
        self._takes_matrices = takes_matrices
        self._extras = Extras(np.zeros(0))

    @property
    def w(self) -> Array:
        return self._vectors[W]

    @property
    def slots(self) -> Mapping[str, Array]:
        return self._slots

    @property
    def kept(self) -> Mapping[str, Array]:
        return self._kept

    @property
    def extras(self) -> Extras:
        return self._extras

    def prepare(self, delta: Delta, count: int, next_rule: Callable[[], Rule] | None) -> bool:
        """False: an update in place cannot be rolled back."""
        return False

    def prepared_squares(self, delta: Delta) -> float | None:
        return None

    def forget_prepared(self) -> None:
        """There is nothing."""

    def update(
        self, delta: Delta, rule: Rule, lr: float, counters: Mapping[str, int] = NOTHING
    ) -> None:
        if self._takes_matrices:
            place = BlockPlace(0, kept=KeptArrays(self._kept, self._kept))
            slots = tuple(self._slots.values())
            rule([Block.in_place(place, self.w, delta.dense(self.w.size), slots)])
        else:
            update_in_place(self.w, delta, self._slots, rule)

    def fill(self, vectors: Mapping[str, Array], extras: Extras | None) -> None:
        for name, values in vectors.items():
            self._vectors[name][:] = values
        if extras is not None:
            # A copy: the array may be a view that keeps a whole message or file in memory.
            self._extras = Extras(np.array(extras.averaged))

    def commit(self, state: Json, *, may_rotate: bool = True) -> LogWrite | None:
        """Nothing is durable."""
        return None

    def resume(self, optimizer: Optimizer) -> Json:
        return {}

    def close(self) -> None:
        """Nothing is durable."""


class InMemory:
    """Storages that no later server can reopen."""

    def create(self, spec: Spec) -> ArraysInMemory:
        return ArraysInMemory(fresh_of(spec), takes_matrices=spec.kept is not None)

    def reopen(self, spec: Spec) -> ArraysInMemory:
        raise Unusable(
            f"shard {spec.shard} does not survive its server: it was stored in memory only",
            hint='with [servers] durability = "process" a server is replaced without loss',
        )

    def of_table(self, name: str) -> InMemory:
        return self

    def discard(self) -> None:
        """There is nothing."""


def fresh(size: int, slots: Mapping[str, float], dtype: str = "float32") -> dict[str, Array]:
    """The vectors of a new shard: "w" all zero, and every slot with its initial value."""
    vectors = {W: np.zeros(size, dtype)}
    return vectors | {name: np.full(size, value, dtype) for name, value in slots.items()}


def fresh_of(spec: Spec) -> dict[str, Array]:
    """All vectors of a new state."""
    kept = {KEPT + name: np.zeros(size, spec.dtype) for name, size in (spec.kept or {}).items()}
    return fresh(spec.size, spec.slots, spec.dtype) | kept


def parted(vectors: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """(the slots, what is kept beside matrices), by their names."""
    slots = {n: a for n, a in vectors.items() if n != W and not n.startswith(KEPT)}
    return slots, {n.removeprefix(KEPT): a for n, a in vectors.items() if n.startswith(KEPT)}


def in_memory(optimizer: Optimizer, w: Array) -> Shard:
    """A shard around the array `w`, which it updates in place."""
    return Shard(optimizer, ArraysInMemory(fresh(w.size, optimizer.slots, w.dtype.name) | {W: w}))
