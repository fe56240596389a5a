"""What the coordinator writes down. Its driver turns these effects into rows and files.

Times in these values are the machine's own (monotonic); the driver stores them as wall-clock time.
They are performed in order, and committed before anything that follows them in the list is sent: a
number that was handed out is on record.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlctl.machine import Effect, Event
from dlctl.messages import Json


@dataclass(frozen=True, slots=True)
class IssueTerm(Effect):
    """An epoch of a slot or a generation of a shard has been issued, and never will be again."""

    name: str
    term: int


@dataclass(frozen=True, slots=True)
class AddEvent(Effect):
    """A line of the run's history."""

    kind: str
    daemon: str
    text: str
    data: Json


@dataclass(frozen=True, slots=True)
class AddMetric(Effect):
    daemon: str
    step: int
    values: Json


@dataclass(frozen=True, slots=True)
class Snapshot(Effect):
    """The state that `status` shows: keys of the run, and one object per daemon."""

    run: Json
    daemons: tuple[Json, ...]


@dataclass(frozen=True, slots=True)
class BeginCheckpoint(Effect):
    """Make the directory; answered by `CheckpointBegun`."""

    number: int
    step: int


@dataclass(frozen=True, slots=True)
class CheckpointBegun(Event):
    number: int
    directory: str
    error: str


@dataclass(frozen=True, slots=True)
class CompleteCheckpoint(Effect):
    """All files are there: write the manifest, then drop the oldest; answered by `CheckpointEnded`."""

    number: int
    directory: str
    manifest: Json
    keep: int


@dataclass(frozen=True, slots=True)
class CheckpointEnded(Event):
    number: int
    error: str


@dataclass(frozen=True, slots=True)
class RecordCheckpoint(Effect):
    number: int
    value: Json


@dataclass(frozen=True, slots=True)
class LaunchAgent(Effect):
    """Place an agent on a host; its end comes back as `ProcessEnded`."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class KillAgent(Effect):
    name: str
