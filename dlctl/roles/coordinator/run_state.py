"""The state of a run that all parts of the coordinator read.

Only the coordinator itself changes the run's state and begins its shutdown (`Control`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from dlctl.algorithms.base import Method
from dlctl.errors import DlctlError
from dlctl.job.config import JobFile
from dlctl.model.parts import Division
from dlctl.records.memory import Entry, Memory, RunMemory
from dlctl.roles.coordinator.members.membership import Daemon, Membership
from dlctl.roles.coordinator.records import EventContext, Owner
from dlctl.roles.coordinator.shutdown import RunShutdown
from dlctl.roles.protocol.keyring import Keyring
from dlctl.util.text import plural
from dlctl.wire.messages import Json


class Control(Protocol):
    """What a part of the coordinator may ask of the coordinator as a whole."""

    def end(
        self,
        state: str,
        reason: str,
        now: float,
        save: bool = True,
        grace_s: float | None = None,
        at_once: bool = False,
        was_closed: bool = False,
    ) -> None:
        """End the run: `state` is stopped, finished or failed.

        save: with a last checkpoint. grace_s: for workers to drain. at_once: only end the
        processes. was_closed: see `RunShutdown`.
        """

    def change_state(self, state: str, reason: str, now: float) -> None: ...

    def begin_checkpoint(
        self,
        now: float,
        listener: Callable[[Json], None] | None = None,
        *,
        of_servers: bool = False,
    ) -> None:
        """`listener` gets the checkpoint's row when it is done. of_servers: without the residuals
        of workers.
        """

    def start_daemon(self, daemon: Daemon, now: float) -> None:
        """Start the next incarnation of a daemon."""

    def admit_members(self, now: float) -> None:
        """Admit exactly the current daemons at the coordinator, and the workers at the servers."""

    def notify_members(self, server: Daemon | None = None) -> None:
        """Send servers, or this one, the list of active workers."""

    def presume_dead(self, daemon: Daemon, now: float) -> None:
        """The process of a daemon is gone; how it ended is unknown."""


WORKING = frozenset(("running", "degraded"))
"""The states of a run that trains."""
NEXT: Mapping[str, frozenset[str]] = {
    # An earlier coordinator may have released the workers already.
    "pending": frozenset(("starting", "running", "stopping")),
    "starting": frozenset(("running", "stopping")),
    "running": frozenset(("degraded", "stopping")),
    "degraded": frozenset(("running", "stopping")),
    "stopping": frozenset(("finished", "stopped", "failed")),
}
"""State of the run -> states that may follow. States that are missing here are final."""


@dataclass(eq=False)
class RunState(Owner):
    PERSISTED = frozenset({"state", "reason", "released_at"})
    run_id: str
    job: JobFile
    """The job file, with the batch size once that is found."""
    algorithm: Method
    keyring: Keyring
    context: EventContext
    members: Membership
    state: str = field(default="pending", init=False)
    reason: str = field(default="", init=False)
    """Why the run is in that state."""
    started_at: float = field(default=0.0, init=False)
    """When this coordinator began to wait for all daemons to be ready."""
    released_at: float | None = field(default=None, init=False)
    """When the workers were released to train."""
    shutdown: RunShutdown | None = field(default=None, init=False)
    """How the run ends, once it does."""
    status_due_at: float = field(default=0.0, init=False)
    """When `status` is to be written next."""

    def memory(self) -> Iterator[Entry]:
        yield Entry("keys", self.keyring.fingerprint)
        released = None if self.released_at is None else True
        yield Entry(RunMemory.KEY, RunMemory(self.state, self.reason, released))

    def recall(self, memory: Memory, now: float) -> None:
        """Which state follows on a restart depends on other parts, too (`Persistence.resume`)."""

    @cached_property
    def division(self) -> Division:
        """What the workers hold and may do."""
        return Division(self.algorithm.shape.parts, self.job)

    @property
    def is_working(self) -> bool:
        return self.state in WORKING

    def change_state(self, state: str, reason: str) -> None:
        """Change the run's state. Raises AssertionError for one that cannot follow."""
        assert state in NEXT.get(self.state, ()), f"{self.state} -> {state}: {reason}"
        self.state, self.reason = state, reason

    def most_workers(self) -> int:
        """The most workers that have a slot at a time."""
        workers = self.job.workers
        return workers.max or workers.count

    def lacking(self) -> str:
        """Why the run does not train, although it could with more workers; "" if it has enough."""
        least, there = self.job.workers.min, len(self.members.live_slots())
        if least is None or there >= least:
            return ""
        return f"{plural(least, 'worker')} at least ({there} there)"

    def keeps_shards(self) -> bool:
        """Whether the next process of a shard can resume from its state."""
        return self.job.servers.durability != "none" and "server" in self.algorithm.shape.survives


@dataclass(eq=False)
class CoordinatorPart:
    """A part of the coordinator that acts on the run as a whole."""

    run: RunState
    control: Control

    @property
    def context(self) -> EventContext:
        return self.run.context

    @property
    def members(self) -> Membership:
        return self.run.members

    def check_running(self) -> None:
        """Raises DlctlError if the run does not train."""
        if not self.run.is_working:
            raise DlctlError(f"the run is {self.run.state}: this can be done while it is running")
