"""The effects by which the coordinator writes records. Its driver turns them into rows and files.

Times in these values are the machine's own (monotonic); the driver stores them as wall-clock time.
Effects are performed in order. `IssueTerm` and `Remember` are committed before any message that
follows them in the list is sent: every decision that another process knows of is on record, and the
next coordinator continues from there. A `RecordCheckpoint` is committed at once, too, if the
database can be written; the others a little later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from dlctl.problems import Fact
from dlctl.records.memory import Entry, Fields, Memory
from dlctl.roles.coordinator.members import daemon_states
from dlctl.roles.coordinator.members.membership import Daemon
from dlctl.roles.protocol.context import COORDINATOR, EXIT_RESTART, Context
from dlctl.roles.protocol.effects import TrackerTrouble
from dlctl.util.record import record
from dlctl.util.text import of_daemon, plural
from dlctl.wire.machine import Effect, Event, Exit
from dlctl.wire.messages import Drain, Json, Kill


@record
class IssueTerm(Effect):
    """A term of a slot or of a shard has been issued; it is never issued again."""

    name: str
    term: int


@record
class Remember(Effect):
    """Persist a piece of the state from which the next coordinator recovers (`Persistence`)."""

    key: str
    value: Any
    """JSON; None: forget the key."""


@record
class PutOnRecord(Effect):
    """Flush all `Remember` effects so far to the disk; answered by `OnRecord`."""


@record
class AddEvent(Effect):
    """A line of the run's history."""

    kind: str
    daemon: str
    text: str
    data: Json


@record
class AddMetric(Effect):
    """A row of a series; some are left out of a long one."""

    daemon: str
    step: int
    values: Json
    is_last: bool = False
    """Never left out."""


@record
class StatusSnapshot(Effect):
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
    """A metric and its direction, as in "val_loss min": the best checkpoint by it is retained, too.
    """


@record
class CheckpointEnded(Event):
    number: int
    error: str


@record
class MirrorCheckpoint(Effect):
    """Upload this complete checkpoint, in another process; answered by `MirrorNews`."""

    number: int


@record
class HurryMirror(Effect):
    """Try again at once if uploads fail: the run ends."""


@record
class RecordCheckpoint(Effect):
    number: int
    value: Json


@record
class LaunchAgent(Effect):
    """Start an agent on a host; its exit is reported by `ProcessEnded`."""

    name: str
    incarnation: int
    secret: str = ""
    """The agent's secret key, if the run's connections have keys."""


@record
class WantHosts(Effect):
    """Of hosts that come and go: which agents have workers. The others need no host."""

    agents: tuple[str, ...]


@record
class KillAgent(Effect):
    name: str


@record
class RenewKey(Effect):
    """Replace the run key by a new one; answered by `KeyRenewed`."""


@record
class KeyRenewed(Event):
    error: str
    """"": the new key is on the disk; else why the old key is unchanged."""


WARNINGS = (
    "exit", "error", "lost", "silent", "late", "checkpoint", "target", "sample", "stream", "data",
    "tracker", "mirror", "rounds",
)  # fmt: skip
"""Kinds of events that are logged as warnings."""


class Remembers(Protocol):
    """A part of the coordinator whose state is persisted."""

    def changes(self) -> Iterable[Entry | Fields]:
        """The pieces that may have changed since the last call; called after every event."""

    def recall(self, memory: Memory, now: float) -> None:
        """Restore the state that an earlier coordinator has persisted; `memory` has all parts."""


class Owner:
    """A part that owns few pieces. They may have changed when one of the attributes in `PERSISTED`
    was assigned: values that are changed in place do not belong there.
    """

    PERSISTED: ClassVar[frozenset[str]]
    _has_changed = True

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in self.PERSISTED:
            object.__setattr__(self, "_has_changed", True)

    def changes(self) -> Iterable[Entry | Fields]:
        if not self._has_changed:
            return ()
        self._has_changed = False
        return self.memory()

    def memory(self) -> Iterator[Entry | Fields]:
        """All pieces, or fields of pieces, that it owns."""
        raise NotImplementedError


class EventContext(Context):
    """The coordinator's context, which also records events."""

    unwritten = ""
    """Why the run's database cannot be written; "" while it can."""
    untracked: Mapping[str, Mapping[str, Fact]] = MappingProxyType({})
    """Tracker that does not take the run's figures -> since when, and why."""
    number = 0
    """The newest number that identifies an evaluation, a change, a list or a group."""

    _has_new_number = True

    def next_number(self) -> int:
        """A number that no coordinator of this run has issued before."""
        self.number += 1
        self._has_new_number = True
        return self.number

    def changes(self) -> Iterator[Entry]:
        if self._has_new_number:
            self._has_new_number = False
            yield Entry("numbers", [self.number])

    def recall(self, memory: Memory, now: float) -> None:
        """Numbers stay unique even if some are not on record: all coordinators of a run share one
        machine's clock, and none issues a thousand numbers per second.
        """
        self.number = max(*memory.value("numbers"), int(now * 1000))
        self._has_new_number = True

    def event(self, kind: str, daemon: str, text: str, **data: Any) -> None:
        """A line of the run's history, and of the coordinator's log."""
        level = "warning" if kind in WARNINGS else "info"
        self.note(level, of_daemon(daemon, text))
        self.do(AddEvent(kind, daemon, text, data))

    def track(self, trouble: TrackerTrouble, now: float) -> None:
        """Note whether a tracker takes the run's figures; an event tells it once."""
        name, why = trouble.tracker, trouble.why
        rest = {key: facts for key, facts in self.untracked.items() if key != name}
        if not why:
            lost = f"; {plural(trouble.dropped, 'row')} dropped" if trouble.dropped else ""
            self.event("tracker", COORDINATOR, f"{name} takes the run's figures again{lost}")
            self.untracked = rest
            return
        before = self.untracked.get(name)
        if before is None:
            text = f"{name} does not take the run's figures: {why}; training goes on"
            self.event("tracker", COORDINATOR, text, code="tracker-failed")
        since = before["since"] if before is not None else now
        self.untracked = rest | {name: {"since": since, "why": why, "dropped": trouble.dropped}}

    def kill(self, daemon: Daemon, signal: int, now: float) -> None:
        """Kill a daemon's process; a request to an agent is resent until the process has ended."""
        if daemon.role == "agent":
            self.do(KillAgent(daemon.name))
        else:
            kill = Kill(daemon.name, daemon.incarnation, signal)
            self.ask(("kill", daemon.name), daemon.agent, kill, now)

    def drain(self, worker: Daemon, why: str, now: float) -> None:
        """Ask a worker to push what it has, and to take no more data."""
        worker.change_state(daemon_states.DRAINING)
        self.ask(("drain", worker.name), worker.name, Drain(why), now)

    def leave(self, text: str) -> None:
        """Exit on request; the next coordinator continues."""
        self.event("restart", COORDINATOR, text)
        self.do(Exit(EXIT_RESTART, text))
