"""One model for all replicas of a host (`links = {"memory"}`), and whether it is the run's yet.

Whoever makes the memory puts the values there that its new model has. In a new run that is the
model; in one that goes on from a checkpoint the first that restores makes it so, and who joins a
run under way without anything to restore waits for that.
"""

from __future__ import annotations

from dlctl import messages as m
from dlctl.errors import JobFailed
from dlctl.roles.worker.services.base import Phase

LOOK_S = 0.1
NOBODY_S = 60.0
"""So long it waits: others may begin later than this one."""


class Sharing:
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
            self._until = now + NOBODY_S
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
