"""How a replica that joins a run gets the model of that, before it does anything else: without
servers from another replica, or with the memory that all replicas of a host share. Where replicas
are a group, the group hands it on instead (`needs.handed_on`).
"""

from __future__ import annotations

import math

from dlctl import messages as m
from dlctl.algorithms.base import ReplicaSide
from dlctl.errors import JobFailed
from dlctl.roles.worker.services.asking import MODEL, Asking
from dlctl.roles.worker.services.base import Phase
from dlctl.vector import copy_into, to_host

NOBODY_S, AGAIN_S = 15.0, 1.0
"""So long it waits for somebody who has the model, and asks all again now and then: others may
begin later than this one.
"""
LOOK_S, SHARED_S = 0.1, 60.0
"""The same where the model is in memory that is shared."""


class TakingOver:
    def __init__(self, asking: Asking, side: ReplicaSide) -> None:
        self._asking = asking
        self._side = side
        self._asked: set[tuple[int, int]] = set()
        """(slot, epoch) of those that have been asked this time."""
        self._again_at: float | None = None
        """When all are asked again."""
        self._asked_at: float | None = None
        self._whom = ""
        """Who has not answered yet."""
        self._until: float | None = None
        """When it gives up."""
        self._is_done = False

    def advance(self, now: float) -> bool:
        """Whether the model is here. Raises JobFailed if nobody has it."""
        if self._is_done or self._whom:
            return self._is_done
        if self._asked_at is not None and now > self._asked_at + NOBODY_S:
            self._until = None  # Who was asked has been waited for, and has died.
        self._asked_at = None
        if self._again_at is not None and now >= self._again_at:
            self._asked.clear()
            self._again_at = None
        me, known = self._asking.identity.slot, self._asking.members.known
        for slot, member in sorted(known.items()):
            if slot != me and member.takes_part and (slot, member.epoch) not in self._asked:
                self._asked.add((slot, member.epoch))
                self._whom, self._asked_at = f"worker-{slot}", now
                self._asking.ask(slot, MODEL, (), math.inf, self._come, now)
                return self._is_done
        others = (member for slot, member in known.items() if slot != me)
        if self._until is None or not all(member.takes_part for member in others):
            self._until = now + NOBODY_S  # Some have not begun yet: they may have it.
        if now >= self._until:
            raise JobFailed(
                "no other worker has the model of this run",
                hint="the run goes on from its newest checkpoint when it is started again",
            )
        if self._again_at is None:
            self._again_at = now + AGAIN_S
        return False

    def _come(self, arrays: tuple[m.Array, ...] | None) -> None:
        self._whom = ""
        if arrays and arrays[0].shape == to_host(self._side.parameters).shape:
            copy_into(self._side.parameters, arrays[0])
            self._is_done = True

    def phase(self) -> Phase:
        whom = (self._whom,) if self._whom else ()
        return Phase("waiting for the model of another worker", whom)

    def deadline(self) -> float | None:
        """Who was asked is waited for as long as it lives."""
        times = [time for time in (self._until, self._again_at) if time is not None]
        return min(times) if times and not self._whom else None


class Sharing:
    """One model for all replicas of a host (`links = {"memory"}`), and whether it is the run's yet.

    Whoever makes the memory puts the values there that its new model has. In a new run that is the
    model; in one that goes on from a checkpoint the first that restores makes it so, and who joins
    a run under way without anything to restore waits for that.
    """

    def __init__(self, mark: m.Array) -> None:
        """mark: `ModelBuilt.mark`, which others write to as well."""
        self._mark = mark
        self._until: float | None = None
        self._look_at: float | None = None

    def has_model(self) -> bool:
        return bool(self._mark[0])

    def has_come(self) -> None:
        """What stands there is a model of the run from now on."""
        self._mark[0] = 1

    def advance(self, now: float) -> bool:
        """Whether the model is there. Raises JobFailed if it does not come."""
        if self.has_model():
            return True
        if self._until is None:
            self._until = now + SHARED_S
        if now >= self._until:
            raise JobFailed(
                "no other worker has the model of this run in the memory of this host",
                hint="the run goes on from its newest checkpoint when it is started again",
            )
        self._look_at = now + LOOK_S
        return False

    def phase(self) -> Phase:
        return Phase("waiting for the model of the other workers")

    def deadline(self) -> float | None:
        return self._look_at
