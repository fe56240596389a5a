"""Shards of a model with matrices, and an optimiser of matrices for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from dlctl import registry
from dlctl.compress.base import Delta
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.optim import on_shard
from dlctl.optim.matrices import kept_of
from dlctl.shards.base import Shard, Spec
from dlctl.shards.memory import InMemory

NAMES = ["muon", "soap", "shampoo", "lmo", "isotropic"]
SHAPES = {"a.weight": (4, 4), "a.bias": (4,), "b.weight": (3, 3)}


def layout(shapes: dict[str, tuple[int, ...]] = SHAPES) -> Layout:
    return Layout(tuple(TensorEntry(n, TRAINED, shape, "float32") for n, shape in shapes.items()))


def placed(name: str, of: Layout | None = None, **how: Any) -> Any:
    """how: lo, hi and groups of the shard, and options."""
    lo, hi, groups = how.pop("lo", 0), how.pop("hi", 0), how.pop("groups", ())
    options = how
    kind = registry.load("optimizers", name)
    made = of or layout()
    return on_shard.make(kind, options, groups, made, lo, hi or made.size())


def spec_of(optimizer: Any, size: int = 0) -> Spec:
    kept = {name: cut.hi - cut.lo for name, cut in kept_of(optimizer).items()}
    return Spec("run-1", 0, 0, size or layout().size(), optimizer.slots, workers=2, kept=kept)


def shard_of(optimizer: Any, size: int = 0) -> Shard:
    return Shard(optimizer, InMemory().create(spec_of(optimizer, size)))


def push(seed: int, size: int = 0) -> Delta:
    values = np.random.default_rng(seed).standard_normal(size or layout().size())
    return Delta(values.astype(np.float32))


def snapshot(shard: Shard) -> dict[str, Any]:
    """All that a shard consists of."""
    vectors = {"w": shard.w, **shard.slots, **shard.storage.kept}
    found: dict[str, Any] = {name: array.tobytes() for name, array in vectors.items()}
    return {**found, "version": shard.version, "counters": dict(shard.optimizer.counters)}
