"""What the parts of the coordinator know of their run: data that all of them read.

Only the coordinator itself changes the run's state and begins its shutdown (`Control`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dlctl.algorithms.base import Method
from dlctl.config import JobFile
from dlctl.roles.coordinator.control import Control
from dlctl.roles.coordinator.membership import Membership
from dlctl.roles.coordinator.records import History
from dlctl.roles.coordinator.shutdown import RunShutdown
from dlctl.roles.protocol.keyring import Keyring

WORKING = frozenset(("running", "degraded"))
"""The states of a run that trains."""
NEXT: Mapping[str, frozenset[str]] = {
    # Another coordinator of this run may have been further already.
    "pending": frozenset(("starting", "running", "stopping")),
    "starting": frozenset(("running", "stopping")),
    "running": frozenset(("degraded", "stopping")),
    "degraded": frozenset(("running", "stopping")),
    "stopping": frozenset(("finished", "stopped", "failed")),
}
"""State of the run -> those that may follow. What is not here is the end."""


@dataclass(slots=True)
class RunState:
    run_id: str
    job: JobFile
    """With the batch size, once that is found."""
    algorithm: Method
    keyring: Keyring
    context: History
    members: Membership
    state: str = field(default="pending", init=False)
    reason: str = field(default="", init=False)
    """Why it is in that state."""
    started_at: float = field(default=0.0, init=False)
    """When this coordinator began to wait for all to be at work."""
    shutdown: RunShutdown | None = field(default=None, init=False)
    """How the run ends, once it does."""
    status_due_at: float = field(default=0.0, init=False)
    """When `status` is to be written next."""

    @property
    def is_working(self) -> bool:
        return self.state in WORKING

    def change_state(self, state: str, reason: str) -> None:
        """Raises AssertionError for a state that cannot follow on the present one."""
        assert state in NEXT.get(self.state, ()), f"{self.state} -> {state}: {reason}"
        self.state, self.reason = state, reason

    def keeps_shards(self) -> bool:
        """Whether the next process of a shard can go on where the one before was."""
        return self.job.servers.durability != "none" and "server" in self.algorithm.shape.survives


@dataclass(eq=False)
class Part:
    """A part of the coordinator that acts on the run as a whole."""

    run: RunState
    control: Control

    @property
    def context(self) -> History:
        return self.run.context

    @property
    def members(self) -> Membership:
        return self.run.members
