"""What the coordinator writes down. Its driver turns these effects into rows and files.

Times in these values are the machine's own (monotonic); the driver stores them as wall-clock time.
They are performed in order. An `IssueTerm` and what is to be remembered are committed before
anything that follows them in the list is sent: what others know of the coordinator's decisions is
on record, and a coordinator that takes its place goes on with it. A `RecordCheckpoint` is committed
at once, too, if the database can be written; the others a little later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from dlctl.machine import Effect, Event, Exit
from dlctl.messages import Drain, Json, Kill
from dlctl.roles.coordinator import daemon_states
from dlctl.roles.coordinator.membership import Daemon
from dlctl.roles.protocol.context import COORDINATOR, EXIT_RESTART, Context
from dlctl.util.record import record
from dlctl.util.text import of_daemon


@record
class IssueTerm(Effect):
    """An epoch of a slot or a generation of a shard has been issued, and never will be again."""

    name: str
    term: int


@record
class Remember(Effect):
    """A piece of the state that the next coordinator of this run goes on with (`Persistence`)."""

    key: str
    value: Any
    """JSON; None: forget the key."""


@record
class PutOnRecord(Effect):
    """Have all that was to be remembered so far on the disk; answered by `OnRecord` when it is."""


@record
class AddEvent(Effect):
    """A line of the run's history."""

    kind: str
    daemon: str
    text: str
    data: Json


@record
class AddMetric(Effect):
    daemon: str
    step: int
    values: Json


@record
class Snapshot(Effect):
    """The state that `status` shows: keys of the run, and one object per daemon."""

    run: Json
    daemons: tuple[Json, ...]


@record
class BeginCheckpoint(Effect):
    """Make the directory; answered by `CheckpointBegun`."""

    number: int
    step: int


@record
class CheckpointBegun(Event):
    number: int
    directory: str
    error: str


@record
class CompleteCheckpoint(Effect):
    """Write the manifest, then drop the oldest; answered by `CheckpointEnded`."""

    number: int
    directory: str
    manifest: Json
    keep: int
    best: str = ""
    """As in "val_loss min": the best by that stays, too."""


@record
class CheckpointEnded(Event):
    number: int
    error: str


@record
class RecordCheckpoint(Effect):
    number: int
    value: Json


@record
class LaunchAgent(Effect):
    """Place an agent on a host; its end comes back as `ProcessEnded`."""

    name: str
    incarnation: int
    secret: str = ""
    """Its secret key, if the run's connections have keys."""


@record
class KillAgent(Effect):
    name: str


@record
class RenewKey(Effect):
    """Put another run key into the place of the present one; answered by `KeyRenewed`."""


@record
class KeyRenewed(Event):
    error: str
    """"": the new key is on the disk; else it is still the old one, and this is why."""


WARNINGS = (
    "exit", "error", "lost", "silent", "late", "checkpoint", "target", "sample", "stream",
)  # fmt: skip
"""Kinds of events that somebody should look at."""


class Remembers(Protocol):
    """A part of the coordinator that the next one goes on with."""

    def memory(self) -> Iterator[tuple[str, Any]]:
        """Key and value, as JSON, of all that it has to know; asked for after every event."""
        ...

    def recall(self, memory: Json, now: float) -> None:
        """Be where the coordinator has left off that has remembered this, all of it."""
        ...


class History(Context):
    """The coordinator's context: what happens there is also written down."""

    unwritten = ""
    """Why the run's database cannot be written; "" while it can."""
    number = 0
    """The newest of those that evaluations, changes, lists and groups are told apart by."""

    def next_number(self) -> int:
        """One that no coordinator of this run has given out before."""
        self.number += 1
        return self.number

    def memory(self) -> Iterator[tuple[str, Any]]:
        yield "numbers", [self.number]

    def recall(self, memory: Json, now: float) -> None:
        """On record or not: all coordinators of a run are on one machine, and none gives out a
        thousand numbers in a second.
        """
        self.number = max(*memory["numbers"], int(now * 1000))

    def event(self, kind: str, daemon: str, text: str, **data: Any) -> None:
        """A line of the run's history, and of the coordinator's log."""
        level = "warning" if kind in WARNINGS else "info"
        self.note(level, of_daemon(daemon, text))
        self.do(AddEvent(kind, daemon, text, data))

    def kill(self, daemon: Daemon, signal: int, now: float) -> None:
        """Have its process end; repeated until it has, if an agent is asked."""
        if daemon.role == "agent":
            self.do(KillAgent(daemon.name))
        else:
            kill = Kill(daemon.name, daemon.incarnation, signal)
            self.ask(("kill", daemon.name), daemon.agent, kill, now)

    def drain(self, worker: Daemon, why: str, now: float) -> None:
        """Have it push what it has, and take no more data."""
        worker.change_state(daemon_states.DRAIN)
        self.ask(("drain", worker.name), worker.name, Drain(why), now)

    def leave(self, text: str) -> None:
        """This coordinator ends, because it was asked to; the next one goes on."""
        self.event("restart", COORDINATOR, text)
        self.do(Exit(EXIT_RESTART, text))
