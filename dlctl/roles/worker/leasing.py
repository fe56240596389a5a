"""How a worker asks for data: when it has none, and some time before that.

There is at most one question on its way. What is asked for in advance may be refused, so that the
others are not left without; then it is asked for again a little later.
"""

from __future__ import annotations

from dlctl import messages as m
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.worker.portions import Portions
from dlctl.roles.worker.shard_client import Identity

IDLE_S = 0.2
"""Between two questions for data while there is none."""


class Leasing:
    def __init__(self, context: Context, identity: Identity, portions: Portions) -> None:
        self.context = context
        self.identity = identity
        self.portions = portions
        self.told_no_data = False
        """The method knows that there is none, and has pushed what it had."""
        self.ask_again_at: float | None = None
        self._number = 0
        self._is_ahead = False
        """The newest question was for work in advance."""
        self._ahead_at = 0.0
        self._none_now = False

    def look_ahead(self, batch_s: float, now: float) -> None:
        """A batch is under way: see to it that there is something after it."""
        if not self.portions.batches_left():
            self._ask(False, now)
        elif now >= self._ahead_at and self.portions.wants_more_ahead(batch_s):
            self._ask(True, now)

    def wait(self, now: float) -> bool:
        """There is nothing to compute. True if the method has to be told so."""
        if self._none_now:
            self._none_now = False
            if not self.told_no_data:
                self.told_no_data = True
                return True
            self.ask_again_at = now + IDLE_S
        if self.ask_again_at is None or now >= self.ask_again_at:
            self.ask_again_at = None
            self._ask(False, now)
        return False

    def _ask(self, ahead: bool, now: float) -> None:
        if "lease" not in self.context.retries:
            self._number += 1
            self._is_ahead = ahead
            me = self.identity
            request = m.LeaseRequest(me.slot, me.epoch, self._number, ahead)
            self.context.ask("lease", COORDINATOR, request, now)

    def on_lease(self, lease: m.Lease, now: float) -> None:
        """The answer; one that nobody waits for any more is dropped."""
        if lease.request != self._number or self.context.retries.done("lease", now) is None:
            return
        if lease.start < lease.stop:
            self.told_no_data = False
            self.portions.take(lease)
        elif self._is_ahead:
            # Perhaps it is needed by now: then `wait` asks for it, and may not be refused.
            self._ahead_at = now + IDLE_S
        elif self.portions.current is None:
            self._none_now = True
