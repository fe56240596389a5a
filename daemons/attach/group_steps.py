"""The steps of the processes of one replica as its steps."""

from __future__ import annotations

from collections.abc import Sequence

from daemons.attach.ranks import ReplicaRanks
from dlctl.roles.protocol.loop_effects import LoopStep


def merged(ranks: ReplicaRanks, mine: tuple[LoopStep, ...]) -> tuple[LoopStep, ...]:
    """In all ranks: the steps that they have made together."""
    if ranks.count == 1:
        return mine
    each = ranks.gathered(mine)
    return ranks.of_rank_0(lambda: _merge(each))


def _merge(each: Sequence[tuple[LoopStep, ...]]) -> tuple[LoopStep, ...]:
    return tuple(_one(parts) for parts in zip(*each, strict=True))


def _one(parts: tuple[LoopStep, ...]) -> LoopStep:
    """Losses and metrics are averaged; samples are added, unless they are those of a lease, of
    which all processes know the same.
    """
    first = parts[0]
    samples = first.samples if first.pieces else sum(part.samples for part in parts)
    losses = [part.loss for part in parts if part.loss is not None]
    metrics = {
        name: sum(part.metrics.get(name, value) for part in parts) / len(parts)
        for name, value in first.metrics.items()
    }
    loss = sum(losses) / len(losses) if losses else None
    return LoopStep(samples, loss, metrics, first.pieces, first.is_skipped)
