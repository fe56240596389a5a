"""The shard side of a method whose lead decides which pushes of a step count (`Lead.quorum`).

On its own each shard would use the pushes that reach it first, and the shards would differ. So
every shard holds the pushes for step t, and reports them to the coordinator. A push has arrived
when all shards hold it. Once the lead has chosen from these, each shard makes the step with exactly
the chosen pushes, in slot order, as their mean weighted by samples. All other pushes of step t and
before are LATE.

- A push belongs to one process: (clock, slot, term). If a worker dies when its push is chosen, all
  shards hold it, and use it. A shard keeps it beside those of the process that replaces the worker.
- A server that dies loses its held pushes. The next one waits for the chosen pushes: living workers
  resend them. It does without those whose worker has died, too. So does a shard that has received
  pushes of two later processes of a worker before the decision for the first one. In these cases
  two shards differ: as in every method, only some shards may have a dead worker's last push.
- After a checkpoint shards may be at different steps, as it is not of one moment. Those behind are
  sent a decision for the step before the newest one, without pushes, which moves them to it.
- A refused push has arrived, and its worker waits for the step: it may be chosen, and the step is
  made without it on the shard that has refused it.

A replica pushes for the clock of its newest read, and reads again until all shards are at the same
clock. Its push settles as APPLIED on all shards or as LATE on all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar

from dlctl import outdated
from dlctl.algorithms.base import Decision, Lead, PushOutcome
from dlctl.algorithms.holding import HeldPush, HoldingSide
from dlctl.shards.base import Shard
from dlctl.wire import messages
from dlctl.wire.messages import HELD, LATE, REFUSED


class Counting(Lead):
    """A lead that counts the steps that use a replica's push."""

    chooses = True

    def __post_init__(self) -> None:
        self._steps = 0
        self.counted: Counter[int] = Counter()
        """Slot -> steps that used its push."""

    def count(self, slots: Collection[int]) -> None:
        """A step is made with the pushes of these slots."""
        self._steps += bool(slots)
        self.counted.update(slots)

    def state(self) -> messages.Json:
        return {"steps": self._steps, "counted": sorted(map(list, self.counted.items()))}

    def resume(self, state: messages.Json) -> None:
        self._steps, self.counted = state["steps"], Counter(dict(state["counted"]))

    def figures(self) -> messages.Json:
        if not self._steps:
            return {}
        return {
            f"worker-{slot} counted": round(n / self._steps, 3)
            for slot, n in sorted(self.counted.items())
        }


class Chosen(HoldingSide):
    """Holds the pushes of step t until the lead has chosen, and makes it with these."""

    asks_lead: ClassVar[bool] = True

    def __init__(self, options: Any, shard: Shard) -> None:
        super().__init__(options, shard)
        self._held: dict[tuple[int, int, int], HeldPush] = {}
        """(clock, slot, term) -> a push."""
        self._decision: Decision | None = None
        """The newest decision, while chosen pushes are missing."""

    def held(self) -> list[tuple[int, int, int, int]]:
        return sorted((*key, self.mean.brings(held.push)) for key, held in self._held.items())

    def decided(self, decision: Decision) -> list[PushOutcome]:
        if decision.clock >= self.shard.version:
            self._decision = decision
        return self._make_steps()

    def members(self, slots: frozenset[int]) -> list[PushOutcome]:
        self.roster.meet(slots, self.shard.version)
        return []

    def joined(self, slot: int) -> list[PushOutcome]:
        """Drop the held pushes of all earlier processes of the slot but the last one, whose pushes
        may have been chosen. So a crash-looping worker does not take more and more memory.
        """
        newest = max((term for _, other, term in self._held if other == slot), default=0)
        self._held = {k: h for k, h in self._held.items() if k[1] != slot or k[2] == newest}
        return []

    def waits_for(self) -> frozenset[int]:
        """Slots of chosen pushes that a previous server has lost; else of missing pushes."""
        if self._decision is not None:
            return frozenset(slot for slot, _ in self._missing(self._decision))
        if not self._held:
            return frozenset()
        return self.roster.members - {slot for clock, slot, _ in self._held}

    def _is_in_time(self, push: messages.Push) -> bool:
        is_over = push.clock < self.shard.version
        return not is_over and (push.clock, push.slot, push.term) not in self._held

    def _hold(self, held: HeldPush) -> list[PushOutcome]:
        push = held.push
        self._held[push.clock, push.slot, push.term] = held
        return [held.outcome(HELD), *self._make_steps()]

    def _missing(self, decision: Decision) -> frozenset[tuple[int, int]]:
        """The (slot, term) of chosen pushes that will be resent."""
        here = {(slot, term) for clock, slot, term in self._held if clock == decision.clock}
        return decision.used - decision.gone - here

    def _make_steps(self) -> list[PushOutcome]:
        decision = self._decision
        if decision is None or self._missing(decision):
            return []
        used = {(decision.clock, *process) for process in decision.used} & self._held.keys()
        if not self.steps.may_make(decision.clock, [self._held[key] for key in sorted(used)]):
            return []
        self._decision = None
        chosen: list[HeldPush] = []
        late: list[HeldPush] = []
        for key in sorted(self._held):
            clock, *process = key
            if clock <= decision.clock:
                is_used = clock == decision.clock and tuple(process) in decision.used
                (chosen if is_used else late).append(self._held.pop(key))
        self.shard.version = decision.clock
        dropped = [held.outcome(REFUSED if held.kept is None else LATE) for held in late]
        return [*dropped, *self.steps.make(chosen)]


if not TYPE_CHECKING:
    __getattr__ = outdated.names_of(__name__)
