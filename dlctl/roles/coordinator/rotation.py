"""A new key for an active run: `dlctl keys rotate`.

The new key replaces the old one, by renaming a file, and this coordinator exits. The next one finds
in the persisted state that the daemons were started with a key other than the current one (`keys`,
the fingerprint), and restarts all of them, as after their deaths: workers with new terms, servers
with their shards' state.

A coordinator may crash at any point. Before the renaming all daemons have the old key. After it
every later coordinator sees that they must be restarted; the restarts are persisted together with
the fingerprint, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dlctl.errors import DlctlError
from dlctl.roles.coordinator.records import KeyRenewed, RenewKey
from dlctl.roles.coordinator.run_state import CoordinatorPart
from dlctl.roles.coordinator.supervision.guests import NEW_KEYS, Guests
from dlctl.roles.coordinator.supervision.scaling import RESTART, Scaling
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.wire.messages import Json, Request


@dataclass(eq=False)
class Rotation(CoordinatorPart):
    answer: Callable[[int, bool, str, Json], None]
    """Answers the request of the command line (`ClientRequests.answer`)."""
    scaling: Scaling
    guests: Guests
    _requests: list[int] = field(default_factory=list, init=False)
    """Numbers of the requests that wait for the new key."""

    # ------------------------------------------------------------ up to the new key

    def begin(self, request: Request, now: float) -> Json | None:
        """The verb "rotate": {"old": fingerprint of the key to be replaced, "by": the requester}.

        Idempotent: if it is repeated to the next coordinator, that answers that it is done. Raises
        DlctlError.
        """
        if request.arguments["old"] != self.run.keyring.fingerprint:
            return {"phase": "done"}
        self.check_running()
        if not self.run.keeps_shards():
            raise DlctlError(
                "the key of this run cannot be rotated while it is running: its servers would be "
                'restarted, and their shards are in memory only (durability = "none"). Use a '
                "checkpoint: dlctl stop, dlctl keys rotate, dlctl start"
            )
        if not self._requests:
            by = f"{request.arguments['by']:.80}"
            self.context.event("keys", "", f"the run gets a new key, as requested by {by}")
            self.context.do(RenewKey())
        self._requests.append(request.request)
        return None

    def on_renewed(self, event: KeyRenewed, now: float) -> None:
        """Hand over to the next coordinator, unless the key could not be written."""
        error, result = "", {"phase": "renewed"}
        if event.error:
            error, result = f"the new key could not be written: {event.error}", {}
        else:
            self.scaling.hand_over("the coordinator is restarted with the new key")
        requests, self._requests = self._requests, []
        for request in requests:
            self.answer(request, True, error, result)

    # ------------------------------------------------------------ with the new key

    def restart_all(self, now: float) -> None:
        """Restart all daemons that are alive: they were started with another run key than ours."""
        self.guests.end_all(NEW_KEYS, now)
        text = "the run has a new key: all daemons are restarted with it"
        self.context.event("keys", COORDINATOR, text)
        if not self.run.keeps_shards():
            text = "the run has a new key, and its shards were in memory only"
            self.control.end("failed", text, now, at_once=True)
        for daemon in list(self.members.daemons.values()):
            if daemon.alive:
                daemon.leaving = daemon.leaving or RESTART
                daemon.killed_for = "restarted with the new key"
                self.control.presume_dead(daemon, now)
