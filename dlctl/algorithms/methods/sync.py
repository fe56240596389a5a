"""Synchronous SGD: a barrier in the servers. Chen et al., "Revisiting Distributed Synchronous SGD",
2016; `backups.py` has the backup workers.

Every replica computes its gradient on the same parameters w_t. A shard waits for the push of step t
from every member, averages by the samples used and updates once:

    w_{t+1} = w_t - eta * sum_i n_i g_i / sum_i n_i          t = the shard's version

so that N workers with batch n are one worker with batch N n. The sum is taken in slot order,
whatever the order of arrival. Rules:

- a replica without data takes part with 0 samples, so that it does not block the barrier;
- a late push is LATE and dropped, never mixed into a later step; so is a second push of a replica
  for the same step;
- a refused push takes part in its step without samples and without a gradient, because its replica
  waits for the next step, too. It is settled with the other pushes of its step, so that a
  replacement server receives it again;
- steps without any push are skipped at once, however many; a push for a step that no shard can be
  at is refused;
- a replica that a shard has not waited for takes part without samples until all shards are at the
  same step again: a gradient is never of parameters of two steps;
- a replica that dies is no longer a member; one that joins counts from its first push on, because
  shards may be at different steps when it joins. Its first pushes have 0 samples;
- a shard whose server dies resumes at its step, and knows from which step on it counts each slot.
  Held pushes are resent: they had not been acknowledged.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from dlctl import outdated
from dlctl.algorithms import barrier
from dlctl.algorithms.base import (
    Needs,
    PushOutcome,
    ReplicaSide,
    ShardSide,
)
from dlctl.algorithms.means import Mean
from dlctl.algorithms.needs import Gradient, NextData, Step, Write
from dlctl.algorithms.noise import NoiseScale
from dlctl.algorithms.roster import Roster, absurd
from dlctl.compress.base import Delta
from dlctl.model.vector import squared_norm
from dlctl.shards.base import Shard
from dlctl.wire import messages
from dlctl.wire.messages import APPLIED, HELD, LATE, REFUSED, Json

NOISE_EVERY = 10
"""Steps. A measurement costs a tenth of an update or more: it reads all pushes once more."""


@dataclass(slots=True, kw_only=True)
class Options:
    pass


Accrues = Generator[NextData | Gradient, Any, int]
"""Computes a gradient, or more; returns their samples, 0 without data."""


class Replica(ReplicaSide):
    def run(self) -> Needs:
        clock = yield from barrier.join()
        while True:
            samples = yield from accrue(self)
            yield write(self, samples, clock)
            clock = yield from barrier.next_step(clock)


def accrue(side: ReplicaSide) -> Accrues:
    """Add the next gradient to the residual. Returns its samples, 0 without data."""
    computed: Step | None = yield Gradient()
    if computed is None:
        return 0
    assert computed.gradient is not None
    side.accrue(computed.gradient)
    return computed.samples


def write(side: ReplicaSide, samples: int, clock: int) -> Write:
    """Push the residual for a step; without samples an empty push, only to take part."""
    if samples:
        return side.write_residual(samples=samples, clock=clock)
    return Write(vector=None, clock=clock)


class HeldPush(NamedTuple):
    push: messages.Push
    kept: Any
    """The part of its delta that the mean needs; None: it was refused."""
    reason: str = ""
    """Why the push was refused; "": it was not."""

    def outcome(self, kind: str) -> PushOutcome:
        return self.push.outcome(kind, reason=self.reason)


class PendingStep(NamedTuple):
    """A step that waits for the norm of all shards."""

    clock: int
    of: tuple[tuple[int, int, int], ...]
    """(slot, epoch, number) of its pushes."""
    mean: Delta | None
    """The mean of the pushes; None: no push had any samples."""
    samples: int
    squared: float
    """The square of the norm of this shard's mean."""


def _names(held: Sequence[HeldPush]) -> tuple[tuple[int, int, int], ...]:
    return tuple((h.push.slot, h.push.epoch, h.push.seq) for h in held)


class HoldingSide(ShardSide):
    """Holds the pushes of a step until a subclass makes the step. Its clock is the step."""

    rule: ClassVar[type[Mean]] = Mean
    """How the step is made of the held pushes."""
    averages: ClassVar[bool] = True

    def __init__(self, options: Any, shard: Shard) -> None:
        super().__init__(options, shard)
        self.mean = self.rule(self)
        self._pending: PendingStep | None = None
        """The next step, complete, while the norm of its gradient over all shards is not known."""
        self._norm: tuple[int, float] | None = None
        """(clock, square of the norm of all shards): the newest known."""
        self._noise = NoiseScale()
        self.roster = Roster()

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        if why := absurd(push, self.shard.version):
            return super().left_out(push, why)
        if not self._is_in_time(push):
            return [push.outcome(LATE)]
        if push.is_part and not self.takes_parts:
            # Missing elements are indistinguishable from zeros; a second part would be too late.
            return self._hold(
                HeldPush(push, None, "it is only a part, and the mean is of whole ones")
            )
        return self._hold(HeldPush(push, self.mean.kept(delta)))

    def left_out(self, push: messages.Push, reason: str) -> list[PushOutcome]:
        if absurd(push, self.shard.version) or not self._is_in_time(push):
            return super().left_out(push, reason)
        return self._hold(HeldPush(push, None, reason))

    @abstractmethod
    def _is_in_time(self, push: messages.Push) -> bool:
        """Whether a push is for this step or a later one, and its replica's first one for it."""

    @abstractmethod
    def _hold(self, held: HeldPush) -> list[PushOutcome]:
        """Hold the push, and make the step if it is complete."""

    @abstractmethod
    def _make_step(self) -> list[PushOutcome]:
        """Make the step, and later ones, if they are complete."""

    def _may_update(self, clock: int, held: Sequence[HeldPush]) -> bool:
        """Whether the step of these pushes can be made. Where it is clipped by the norm of all
        shards, each needs to know that first, even a shard without any part of it.
        """
        if not self.shard.shares_norm or (self._norm is not None and self._norm[0] == clock):
            return True
        if (
            self._pending is None
            or self._pending.of != _names(held)
            or self._pending.clock != clock
        ):
            mean, samples = self._mean_of_step(held)
            squared = 0.0 if mean is None else squared_norm(mean.values)
            self._pending = PendingStep(clock, _names(held), mean, samples, squared)
        return False

    def norm_part(self) -> tuple[int, float] | None:
        if self._pending is None or (
            self._norm is not None and self._norm[0] == self._pending.clock
        ):
            return None
        return self._pending.clock, self._pending.squared

    def norm_known(self, clock: int, squared: float) -> list[PushOutcome]:
        if self._pending is None or clock != self._pending.clock:
            return []
        self._norm = clock, squared
        return self._make_step()

    def _update(self, held: Sequence[HeldPush]) -> list[PushOutcome]:
        """Make this step with these pushes, in their order."""
        known, self._pending = self._pending, None
        if known is not None and known.of == _names(held):
            mean, samples = known.mean, known.samples
        else:
            mean, samples = self._mean_of_step(held)
        if mean is None:
            self.shard.version += 1
        else:
            if self._is_noise_due():
                self._measure_noise(held, mean)
            norm = math.sqrt(self._norm[1]) if self._norm and self.shard.shares_norm else None
            self.mean.apply(mean, samples, norm)
        return [h.outcome(REFUSED if h.kept is None else APPLIED) for h in held]

    def _mean_of_step(self, held: Sequence[HeldPush]) -> tuple[Delta | None, int]:
        """(the mean of these pushes, or None if none has samples; all samples)"""
        used = [h for h in held if h.kept is not None and self.mean.counts(h.push)]
        if not used:
            return None, 0
        mean = self.mean.of([h.kept for h in used], self.mean.shares([h.push for h in used]))
        return mean, sum(h.push.samples for h in used)

    def _is_noise_due(self) -> bool:
        is_due = self.shard.version % NOISE_EVERY == 0
        return is_due and self.measures_noise and self.mean.is_of_gradients

    def _measure_noise(self, held: Sequence[HeldPush], mean: Delta) -> None:
        """Update the noise scale; all shards do so at the same steps."""
        used = [h for h in held if h.kept is not None and h.push.samples]
        squares = sum(squared_norm(h.kept) for h in used)
        self._noise.add(squares, squared_norm(mean.values), [h.push.samples for h in used])

    def figures(self) -> Json:
        parts = self._noise.parts()
        return {} if parts is None else {"noise_parts": list(parts)}


class Barrier(HoldingSide):
    """Holds the pushes of step t until those of all that count from this step on have arrived."""

    def __init__(self, options: Options, shard: Shard) -> None:
        super().__init__(options, shard)
        self._held: dict[tuple[int, int], HeldPush] = {}
        """(clock, slot) -> a held push."""

    def _is_in_time(self, push: messages.Push) -> bool:
        """Whether a push is in time. Either way its replica counts from now on."""
        if self.roster.clock_of(push.slot) is None:
            self.roster.count(push.slot, max(push.clock, self.shard.version))
        is_over = push.clock < self.shard.version
        return not is_over and (push.clock, push.slot) not in self._held

    def _hold(self, held: HeldPush) -> list[PushOutcome]:
        self._held[held.push.clock, held.push.slot] = held
        return [held.outcome(HELD), *self._complete()]

    def joined(self, slot: int) -> list[PushOutcome]:
        if is_under_way := self.shard.version > 0 or bool(self._held):
            self._held = {key: held for key, held in self._held.items() if key[1] != slot}
        self.roster.join(slot, is_under_way=is_under_way)
        return self._complete()

    def members(self, slots: frozenset[int]) -> list[PushOutcome]:
        self.roster.meet(slots, self.shard.version)
        return self._complete()

    def state(self) -> Json:
        return self.roster.state()

    def resume(self, state: Json) -> None:
        self.roster.resume(state)

    def _make_step(self) -> list[PushOutcome]:
        return self._complete()

    def _complete(self) -> list[PushOutcome]:
        done: list[PushOutcome] = []
        while self._is_complete(self.shard.version):
            clock = self._next_clock()
            if clock == self.shard.version:
                slots = sorted(slot for (c, slot) in self._held if c == clock)
                if not self._may_update(clock, [self._held[clock, slot] for slot in slots]):
                    break
                done += self._update([self._held.pop((clock, slot)) for slot in slots])
            else:
                self.shard.version = clock
        return done

    def _next_clock(self) -> int:
        """The first step from this one on that has a push, or from which on a slot counts.

        If this step is complete, so are all before that one, without a push. Skipping them one by
        one could take long: a push may name a step that is far ahead.
        """
        clocks = [*(clock for clock, _ in self._held), *self.roster.counted().values()]
        return min(clock for clock in clocks if clock >= self.shard.version)

    def _is_complete(self, clock: int) -> bool:
        """Whether no due slot is missing and some slot has pushed.

        A replica that has pushed for a later step will not push for this one any more: it joined
        when another shard was ahead of this one.
        """
        newest = self._newest()
        return bool(newest) and not self._missing(newest, clock)

    def _newest(self) -> dict[int, int]:
        """Slot -> the latest step that a push of it is held for."""
        return {slot: c for c, slot in sorted(self._held) if slot in self.roster.members}

    def _missing(self, newest: dict[int, int], clock: int) -> frozenset[int]:
        due = (slot for slot, since in self.roster.counted().items() if since <= clock)
        return frozenset(slot for slot in due if newest.get(slot, -1) < clock)

    def waits_for(self) -> frozenset[int]:
        newest = self._newest()
        return self._missing(newest, self.shard.version) if newest else frozenset()


if not TYPE_CHECKING:
    __getattr__ = outdated.names_of(__name__)
