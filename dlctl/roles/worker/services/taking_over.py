"""How a joining replica gets the run's model before it begins: without servers from another
replica, or from the memory that all replicas of a host share. If the replicas form a group, the
group passes the model on instead (`needs.passed_on`).
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
"""Timeout for a replica that has the model, and the interval at which all are asked again: others
may begin later than this one.
"""
LOOK_S, SHARED_S = 0.1, 60.0
"""Poll interval and timeout for a model in shared memory."""


class TakingOver:
    def __init__(self, asking: Asking, side: ReplicaSide) -> None:
        self._asking = asking
        self._side = side
        self._asked: set[tuple[int, int]] = set()
        """(slot, epoch) of the replicas asked in this round."""
        self._again_at: float | None = None
        """When all are asked again."""
        self._asked_at: float | None = None
        self._waits_for = ""
        """The replica that has not answered yet."""
        self._until: float | None = None
        """The deadline."""
        self._is_done = False

    def advance(self, now: float) -> bool:
        """Whether the model has arrived. Raises JobFailed if no replica has it."""
        if self._is_done or self._waits_for:
            return self._is_done
        if self._asked_at is not None and now > self._asked_at + NOBODY_S:
            self._until = None  # The replica that was asked has died: restart the timeout.
        self._asked_at = None
        if self._again_at is not None and now >= self._again_at:
            self._asked.clear()
            self._again_at = None
        me, known = self._asking.identity.slot, self._asking.members.known
        for slot, member in sorted(known.items()):
            if slot != me and member.takes_part and (slot, member.epoch) not in self._asked:
                self._asked.add((slot, member.epoch))
                self._waits_for, self._asked_at = f"worker-{slot}", now
                self._asking.ask(slot, MODEL, (), math.inf, self._on_model, now)
                return self._is_done
        others = (member for slot, member in known.items() if slot != me)
        if self._until is None or not all(member.takes_part for member in others):
            self._until = now + NOBODY_S  # Some have not begun yet: they may have it.
        if now >= self._until:
            raise JobFailed(
                "no other worker has the model of this run",
                hint="the run resumes from its newest checkpoint when it is started again",
            )
        if self._again_at is None:
            self._again_at = now + AGAIN_S
        return False

    def _on_model(self, arrays: tuple[m.Array, ...] | None) -> None:
        self._waits_for = ""
        if arrays and arrays[0].shape == to_host(self._side.parameters).shape:
            copy_into(self._side.parameters, arrays[0])
            self._is_done = True

    def phase(self) -> Phase:
        whom = (self._waits_for,) if self._waits_for else ()
        return Phase("waiting for the model of another worker", whom)

    def deadline(self) -> float | None:
        """None while a replica that was asked is alive: it is waited for without a timeout."""
        times = [time for time in (self._until, self._again_at) if time is not None]
        return min(times) if times and not self._waits_for else None


class Sharing:
    """One model for all replicas of a host (`links = {"memory"}`), and whether it is the run's yet.

    The process that creates the memory fills it with the values of its new model. In a new run that
    is the model; in a run that resumes from a checkpoint the first replica that restores makes it
    valid, and a replica that joins a run in progress with nothing to restore waits for that.
    """

    def __init__(self, mark: m.Array) -> None:
        """mark: `ModelBuilt.mark`, to which other replicas write as well."""
        self._mark = mark
        self._until: float | None = None
        self._poll_at: float | None = None

    def has_come(self) -> None:
        """Mark the shared memory as a model of the run."""
        self._mark[0] = 1

    def advance(self, now: float) -> bool:
        """Whether the model is valid. Raises JobFailed after the timeout."""
        if self._mark[0]:
            return True
        if self._until is None:
            self._until = now + SHARED_S
        if now >= self._until:
            raise JobFailed(
                "no other worker has the model of this run in the memory of this host",
                hint="the run resumes from its newest checkpoint when it is started again",
            )
        self._poll_at = now + LOOK_S
        return False

    def phase(self) -> Phase:
        return Phase("waiting for the model of the other workers")

    def deadline(self) -> float | None:
        return self._poll_at
