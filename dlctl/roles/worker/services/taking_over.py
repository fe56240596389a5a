"""How a joining replica gets the run's model before it begins: without servers from another
replica, or from the memory that all replicas of a host share. If the replicas form a group, the
group passes the model on instead (`needs.passed_on`).
"""

from __future__ import annotations

import math

from dlctl.algorithms.base import ReplicaSide
from dlctl.errors import JobFailed
from dlctl.model.vector import copy_into, to_host
from dlctl.roles.worker.services.asking import MODEL, Asking
from dlctl.roles.worker.services.base import Phase
from dlctl.wire import messages as m

ROUNDS_MAX, ROUND_S = 15, 1.0
"""Rounds in which all are asked, and none has the model; and the time from one to the next: others
may begin later than this one.
"""
LOOK_S, SHARED_S = 0.1, 60.0
"""Poll interval and timeout for a model in shared memory."""


class TakingOver:
    def __init__(self, asking: Asking, side: ReplicaSide) -> None:
        self._asking = asking
        self._side = side
        self._rounds, self._next_at = 0, 0.0
        """Rounds since all others take part, and when the next one may begin."""
        self._left: list[int] = []
        """The slots that are not asked yet in this round."""
        self._waits_for = ""
        """The replica that has not answered yet."""
        self._is_done = False

    def advance(self, now: float) -> bool:
        """Whether the model has arrived. Raises JobFailed if no replica has it."""
        if self._is_done or self._waits_for:
            return self._is_done
        if not self._left and now >= self._next_at:
            known = self._asking.members.known.items()
            others = {slot: member for slot, member in known if slot != self._asking.identity.slot}
            self._left = sorted(slot for slot, member in others.items() if member.takes_part)
            # Those that have not begun yet may have it.
            self._rounds = self._rounds + 1 if len(self._left) == len(others) else 0
            if self._rounds > ROUNDS_MAX:
                raise _nobody_has_it()
            self._next_at = now + ROUND_S
        while self._left and not self._waits_for:
            slot = self._left.pop(0)
            self._waits_for = f"worker-{slot}"
            self._asking.ask(slot, MODEL, (), math.inf, self._on_model, now)
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
        return None if self._waits_for else self._next_at


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

    def advance(self, now: float) -> bool:
        """Whether the model is valid. Raises JobFailed after the timeout."""
        if self._mark[0]:
            return True
        if self._until is None:
            self._until = now + SHARED_S
        if now >= self._until:
            raise _nobody_has_it(" in the memory of this host")
        self._poll_at = now + LOOK_S
        return False

    def phase(self) -> Phase:
        return Phase("waiting for the model of the other workers")

    def deadline(self) -> float | None:
        return self._poll_at


def _nobody_has_it(where: str = "") -> JobFailed:
    return JobFailed(
        f"no other worker has the model of this run{where}",
        hint="the run resumes from its newest checkpoint when it is started again",
    )
