"""Replicas of a method without servers, each of which begins somewhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
from by_hand import Player, Shards

from dlctl.algorithms.base import Method
from dlctl.algorithms.needs import NextBatch, Step

SIZE, LR = 8, 0.1


def gradient_of(w: np.ndarray[Any, Any], batch: list[int]) -> Step:
    """Of |w - x|^2 / 2, where x is the batch's own."""
    x = np.random.default_rng(batch).standard_normal(SIZE).astype(np.float32)
    return Step((w - x).astype(np.float32), 1, 1.0)


def players(method: Method, workers: int, lr: float = LR, **options: Any) -> list[Player]:
    shards = Shards(method, np.zeros(SIZE, np.float32), 0)
    shards.slots = frozenset(range(workers))
    everybody = [
        Player(method, shards, gradient_of, slot, own_lr=lr, options=method.Options(**options))
        for slot in range(workers)
    ]
    for player in everybody:
        rng = np.random.default_rng(100 + player.slot)
        player.parameters[:] = rng.standard_normal(SIZE)
    return everybody


def step(player: Player, number: int) -> None:
    player.todo += [(NextBatch(0, number, True), [player.slot, number])]
    player.advance()
