"""How a replica that joins a run without servers gets its model: from another one, before it does
anything else. Where replicas are a group, the group hands it on instead (`needs.handed_on`).
"""

from __future__ import annotations

import math

from dlctl import messages as m
from dlctl.algorithms.base import ReplicaSide
from dlctl.errors import JobFailed
from dlctl.roles.worker.services.asking import MODEL, Asking
from dlctl.roles.worker.services.base import Phase
from dlctl.vector import copy_into, to_host

NOBODY_S = 60.0
"""So long it waits for somebody who has the model: others may begin later than this one."""


class TakingOver:
    def __init__(self, asking: Asking, side: ReplicaSide) -> None:
        self._asking = asking
        self._side = side
        self._asked: set[tuple[int, int]] = set()
        """(slot, epoch) of those that have been asked."""
        self._whom = ""
        """Who has not answered yet."""
        self._until: float | None = None
        """When it gives up, while nobody is left to be asked."""
        self._is_done = False

    def advance(self, now: float) -> bool:
        """Whether the model is here. Raises JobFailed if nobody has it."""
        if self._is_done or self._whom:
            return self._is_done
        if self._until is None:
            self._until = now + NOBODY_S
        me, known = self._asking.identity.slot, self._asking.members.known
        for slot, member in sorted(known.items()):
            if slot != me and member.takes_part and (slot, member.epoch) not in self._asked:
                self._asked.add((slot, member.epoch))
                self._whom = f"worker-{slot}"
                self._asking.ask(slot, MODEL, (), math.inf, self._come, now)
                return self._is_done
        if now >= self._until:
            raise JobFailed(
                "no other worker has the model of this run",
                hint="the run goes on from its newest checkpoint when it is started again",
            )
        return False

    def _come(self, arrays: tuple[m.Array, ...] | None) -> None:
        self._whom, self._until = "", None
        if arrays and arrays[0].shape == to_host(self._side.parameters).shape:
            copy_into(self._side.parameters, arrays[0])
            self._is_done = True

    def phase(self) -> Phase:
        whom = (self._whom,) if self._whom else ()
        return Phase("waiting for the model of another worker", whom)

    def deadline(self) -> float | None:
        """Who was asked is waited for as long as it lives."""
        return None if self._whom else self._until
