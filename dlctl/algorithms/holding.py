"""Shard sides that hold pushes until one step can be made of several: `barrier.Barrier`, of those
of all members, and `quorum.Chosen`, of those that the lead chooses.

A method declares beside the side how they are averaged: `Method(shard=Barrier, mean=SparseMean)`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from dlctl import outdated
from dlctl.algorithms.base import PushOutcome, ShardSide
from dlctl.algorithms.noise import NoiseScale
from dlctl.algorithms.roster import Roster, absurd
from dlctl.algorithms.shared_norm import SharedNorm
from dlctl.compress.base import Delta
from dlctl.model.vector import squared_norm
from dlctl.shards.base import Shard
from dlctl.wire import messages
from dlctl.wire.messages import APPLIED, LATE, REFUSED, Json

NOISE_EVERY = 10
"""Steps. A measurement costs a tenth of an update or more: it reads all pushes once more."""


class HeldPush(NamedTuple):
    push: messages.Push
    kept: Any
    """The part of its delta that the mean needs; None: it was refused."""
    reason: str = ""
    """Why it was refused."""

    def outcome(self, kind: str) -> PushOutcome:
        return self.push.outcome(kind, reason=self.reason)


class Joint(NamedTuple):
    """What a step of several pushes adds up to."""

    clock: int
    of: tuple[tuple[int, int, int], ...]
    """(slot, term, number) of its pushes."""
    mean: Delta | None
    """None: no push had any samples."""
    samples: int


class JointStep:
    """Makes the steps of a shard side, each with the pushes that it is given, in their order."""

    def __init__(self, side: ShardSide, norm: SharedNorm) -> None:
        self.side = side
        self._norm = norm
        self._pending: Joint | None = None
        """The next step, while its norm is not known."""
        self._noise = NoiseScale()

    def may_make(self, clock: int, held: Sequence[HeldPush]) -> bool:
        """Whether the step of these pushes can be made. Where it is clipped by the norm of all
        shards, each needs to know that first, even a shard without any part of it.
        """
        if not self._norm.is_missing(clock):
            return True
        if not self._is_pending(clock, held):
            self._pending = joint = self._joint(clock, held)
            self._norm.tell(clock, 0.0 if joint.mean is None else squared_norm(joint.mean.values))
        return False

    def make(self, held: Sequence[HeldPush]) -> list[PushOutcome]:
        """Make the step that the shard is at."""
        side, clock = self.side, self.side.shard.version
        is_known, pending = self._is_pending(clock, held), self._pending
        joint = pending if pending is not None and is_known else self._joint(clock, held)
        self._pending, norm = None, self._norm.take()
        if joint.mean is None:
            side.shard.version += 1
        else:
            if self._is_noise_due():
                self._measure_noise(held, joint.mean)
            side.mean.apply(joint.mean, joint.samples, norm)
        return [h.outcome(REFUSED if h.kept is None else APPLIED) for h in held]

    def figures(self) -> Json:
        parts = self._noise.parts()
        return {} if parts is None else {"noise_parts": list(parts)}

    def _is_pending(self, clock: int, held: Sequence[HeldPush]) -> bool:
        pending = self._pending
        return pending is not None and (pending.clock, pending.of) == (clock, _names(held))

    def _joint(self, clock: int, held: Sequence[HeldPush]) -> Joint:
        mean = self.side.mean
        used = [h for h in held if h.kept is not None and mean.counts(h.push)]
        if not used:
            return Joint(clock, _names(held), None, 0)
        delta = mean.of([h.kept for h in used], mean.shares([h.push for h in used]))
        return Joint(clock, _names(held), delta, sum(h.push.samples for h in used))

    def _is_noise_due(self) -> bool:
        side = self.side
        is_due = side.shard.version % NOISE_EVERY == 0
        return is_due and side.measures_noise and side.mean.is_of_gradients

    def _measure_noise(self, held: Sequence[HeldPush], mean: Delta) -> None:
        """All shards do so at the same steps."""
        used = [h for h in held if h.kept is not None and h.push.samples]
        squares = sum(squared_norm(h.kept) for h in used)
        self._noise.add(squares, squared_norm(mean.values), [h.push.samples for h in used])


def _names(held: Sequence[HeldPush]) -> tuple[tuple[int, int, int], ...]:
    return tuple((h.push.slot, h.push.term, h.push.seq) for h in held)


class HoldingSide(ShardSide):
    """Holds the pushes of a step until a subclass makes the step. Its clock is the step."""

    averages: ClassVar[bool] = True

    def __init__(self, options: Any, shard: Shard) -> None:
        super().__init__(options, shard)
        self.shared_norm = SharedNorm(self._make_steps)
        self.steps = JointStep(self, self.shared_norm)
        self.roster = Roster()

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        if why := absurd(push, self.shard.version):
            return super().left_out(push, why)
        if not self._is_in_time(push):
            return [push.outcome(LATE)]
        if push.is_part and not self.mean.takes_parts:
            # Missing elements are indistinguishable from zeros; a second part would be too late.
            return self._hold(
                HeldPush(push, None, "it is only a part, and the mean is of whole ones")
            )
        return self._hold(HeldPush(push, self.mean.kept(delta)))

    def left_out(self, push: messages.Push, reason: str) -> list[PushOutcome]:
        if absurd(push, self.shard.version) or not self._is_in_time(push):
            return super().left_out(push, reason)
        return self._hold(HeldPush(push, None, reason))

    def figures(self) -> Json:
        return self.steps.figures()

    @abstractmethod
    def _is_in_time(self, push: messages.Push) -> bool:
        """Whether a push is for this step or a later one, and its replica's first one for it."""

    @abstractmethod
    def _hold(self, held: HeldPush) -> list[PushOutcome]:
        """Hold the push, and make the step if it is complete."""

    @abstractmethod
    def _make_steps(self) -> list[PushOutcome]:
        """Make the step, and later ones, if they are complete."""


if not TYPE_CHECKING:
    __getattr__ = outdated.names_of(__name__)
