"""A new key for a run that goes on: `dlctl keys rotate`.

The new key takes the place of the old one, by renaming a file, and this coordinator ends. The next
one finds in its memory that the daemons were started with another key than the one that is there
(`keys`, the fingerprint), and begins all of them anew, as after their deaths: workers with new
epochs, servers with what their shards have kept.

Nothing else is needed if a coordinator dies on the way. Before the renaming all have the old key.
After it every later coordinator sees what has to be done; what it has done of it is remembered
together with the fingerprint, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dlctl.errors import DlctlError
from dlctl.messages import Json, Request
from dlctl.roles.coordinator import daemon_states
from dlctl.roles.coordinator.lease_scheduler import LeaseScheduler
from dlctl.roles.coordinator.records import KeyRenewed, RenewKey
from dlctl.roles.coordinator.run_state import Part
from dlctl.roles.coordinator.scaling import REMOVAL, Scaling
from dlctl.roles.protocol.context import COORDINATOR

Answer = Callable[[int, bool, str, Json], None]
"""As `Clients.answer`: the number of a request, whether it is done, what is wrong, its result."""


@dataclass(eq=False)
class Rotation(Part):
    answer: Answer
    scheduler: LeaseScheduler
    scaling: Scaling
    _requests: list[int] = field(default_factory=list, init=False)
    """Who waits for the new key."""

    # ------------------------------------------------------------ up to the new key

    def begin(self, request: Request, now: float) -> None:
        """The verb "rotate": {"old": fingerprint of the key to be replaced, "by": who asks}.

        One that is repeated to the next coordinator finds it done. Raises DlctlError.
        """
        if request.arguments["old"] != self.run.keyring.fingerprint:
            self.answer(request.request, True, "", {"phase": "done"})
            return
        self._check()
        if not self._requests:
            by = f"{request.arguments['by']:.80}"
            self.context.event("keys", "", f"the run gets a new key, as {by} has asked for")
            self.context.do(RenewKey())
        self._requests.append(request.request)

    def _check(self) -> None:
        if not self.run.is_working:
            raise DlctlError(
                f"the run is {self.run.state}: new keys can be had while it is running"
            )
        if not self.run.keeps_shards():
            raise DlctlError(
                "this run cannot have new keys while it is running: its servers would be begun "
                'anew, and their shards are in memory only (durability = "none"). Through a '
                "checkpoint it can: dlctl stop, dlctl keys rotate, dlctl start"
            )

    def on_renewed(self, event: KeyRenewed, now: float) -> None:
        """Over to the next coordinator, unless the key could not be written."""
        error, result = "", {"phase": "renewed"}
        if event.error:
            error, result = f"the new key could not be written: {event.error}", {}
        else:
            self.scaling.hand_over("the coordinator is restarted, to begin with the new key")
        requests, self._requests = self._requests, []
        for request in requests:
            self.answer(request, True, error, result)

    # ------------------------------------------------------------ with the new key

    def begin_all_anew(self, now: float) -> None:
        """All daemons that there may be have been started with another run key than ours."""
        text = "the run has a new key: all daemons begin anew with theirs"
        self.context.event("keys", COORDINATOR, text)
        for agent in self.members.of_role("agent"):
            agent.restarts += 1
            self.control.start_daemon(agent, now)
        for worker in self.members.of_role("worker"):
            self.scheduler.gone(worker.index, now)
            if worker.leaving == REMOVAL:
                self.members.remove(worker.name)
        for daemon in self.members.daemons.values():
            if daemon.role == "agent" or daemon.state == "quarantined":
                continue
            daemon.leaving = daemon.address = ""
            daemon.peer = daemon.pid = None
            keeps = daemon.role == "worker" or self.run.keeps_shards()
            daemon.change_state(daemon_states.RENEW if keeps else daemon_states.GIVE_UP)
            daemon.retry_at = now if keeps else None
            daemon.restarts += 1
        if not self.run.keeps_shards():
            self.control.end(
                "failed", "the run has a new key, and its shards were in memory only", now
            )
