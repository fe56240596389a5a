"""Rules of tables without an optimiser: a push is added, or replaces the values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dlctl.job.settings import Setting
from dlctl.optim import compiled
from dlctl.optim.blocks import Block, Rule
from dlctl.wire.messages import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    lr: float = 1.0


class Add:
    """Adds a push to the parameters: w += g."""

    Options: ClassVar[type[Any]] = NoOptions
    live: ClassVar[Mapping[str, Setting]] = {}

    def __init__(self, options: NoOptions | None = None) -> None:
        self.lr = 1.0
        self.slots: Mapping[str, float] = {}
        self.counters: Json = {}

    def begin_update(self) -> Rule:
        return _add


class Set(Add):
    """w = g, where g has anything."""

    def begin_update(self) -> Rule:
        return _set


class Accrue(Add):
    """w = lr w + g: the rate is the part that stays of what there was."""

    def begin_update(self) -> Rule:
        stays = self.lr

        def accrue(blocks: Iterable[Block]) -> None:
            for _, w, g, _, w_next, _ in blocks:
                np.multiply(w, w.dtype.type(stays), out=w_next)
                w_next += g

        return compiled.rule("accrue", accrue, stays)


def _add(blocks: Iterable[Block]) -> None:
    for _, w, g, _, w_next, _ in blocks:
        np.add(w, g, out=w_next)


def _set(blocks: Iterable[Block]) -> None:
    for _, _, g, _, w_next, _ in blocks:
        # As a sum: the shard detects values that are not finite by numpy's arithmetic.
        np.add(g, np.float32(0), out=w_next)
