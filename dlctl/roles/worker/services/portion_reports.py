"""Which portions are done, and the reports of that: the same for whoever computes the steps."""

from __future__ import annotations

from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.worker.accounts import Accounts
from dlctl.roles.worker.leases import Portion
from dlctl.roles.worker.services.writing import Writing
from dlctl.roles.worker.shard_client import Identity


class PortionReports:
    def __init__(
        self, context: Context, identity: Identity, accounts: Accounts, writing: Writing
    ) -> None:
        self._context, self._identity = context, identity
        self._portions, self._progress = accounts.portions, accounts.progress
        self._writing = writing

    def computed(self, portion: Portion, now: float) -> None:
        """All of its samples were computed. It is done when the pushes with them are settled."""
        portion.computed_at = self._writing.steps
        self._portions.finish(portion)
        if not self._writing.has_unpushed_steps():
            # Its last steps were unusable: the rest of the portion was pushed before.
            last = self._writing.newest
            self._portions.pushed(last, self._writing.steps_pushed)
            if not self._writing.is_under_way(last):
                self.done(self._portions.settled(last), now)

    def done_without_push(self, but: int, now: float) -> None:
        """All steps except the newest `but` are done, although no push holds them."""
        self._writing.done(but)
        self._progress.pushed()
        self.done(self._portions.done_now(self._writing.steps_pushed, but), now)

    def done(self, portions: list[Portion], now: float) -> None:
        """Report them until the coordinator has noted it."""
        for portion in portions:
            message = portion.report(self._identity.slot, self._identity.term)
            key = ("portion", message.data_epoch, message.portion)
            self._context.ask(key, COORDINATOR, message, now)
