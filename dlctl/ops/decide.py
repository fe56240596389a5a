"""What `start`, `plan` and `recover` do with a job or a run: two decision tables.

`cases.py` gathers the facts and looks up the action: that of the first row whose conditions hold.
Inspecting shards may require queries to other hosts, and a checkpoint is good only when every byte
of it has been read. So neither is known at first (None): two actions request it, and then the table
is evaluated again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class RunCase(StrEnum):
    NONE = "none"
    LIVE = "live"
    SILENT = "silent"
    """Live, but its coordinator does not answer; to `start` it is live."""
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    """The run failed, or its coordinator is gone; to `start` it is live while an agent restarts it.
    """


class Shards(StrEnum):
    WHOLE = "whole"
    """The coordinator's memory and every shard exist: the run can resume where it stopped."""
    EMPTY = "empty"
    """The coordinator's memory and every shard exist, and no update was applied."""
    LOST = "lost"
    AWAY = "away"
    """The shards are on hosts that are unreachable or were not queried."""


class SavedCase(StrEnum):
    """The newest good checkpoint that has more than initial values."""

    GOOD = "good"
    OTHER = "other"
    """Good, but of another method or optimiser than the job's."""
    DAMAGED = "damaged"
    """There are checkpoints, all of them damaged."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Facts:
    run: RunCase = RunCase.NONE
    """The newest run of the job, or the named run."""
    fresh: bool = False
    """A new run was requested."""
    changed: bool = False
    """The job file differs from the effective settings of a live run."""
    goal_reached: bool = False
    begun: bool = True
    """The workers were released once: there may be updates."""
    back: bool = False
    """Roll back to a checkpoint even if all shards exist: on request, because the job file has
    changed, or because the workers' results were unusable."""
    shards: Shards | None = None
    saved: SavedCase | None = None


class Action(StrEnum):
    BEGIN = "begin"
    BEGIN_FROM = "begin from"
    """A new run from the checkpoint of the last one."""
    CONTINUE = "go on"
    """Resume where it stopped; nothing is lost."""
    RESUME = "resume"
    """Resume a run from its checkpoint."""
    ALREADY_RUNNING = "alive"
    OVER = "over"
    """Do nothing: the run has stopped or finished in an orderly way."""

    LOOK_AT_SHARDS = "look at shards"
    READ_CHECKPOINTS = "read checkpoints"

    REFUSE_SECOND = "second"
    """Refuse: it would be a second concurrent run of the job."""
    REFUSE_CHANGED = "changed"
    REFUSE_DAMAGED = "damaged"
    REFUSE_KEPT = "kept"
    """The servers' state has all progress, and no good checkpoint has any of it."""
    REFUSE_SILENT = "silent"
    REFUSE_NOTHING = "nothing"
    """There is nothing to resume from."""
    WAIT_FOR_HOSTS = "away"

    @property
    def is_look(self) -> bool:
        return self in (Action.LOOK_AT_SHARDS, Action.READ_CHECKPOINTS)


Row = tuple[Mapping[str, Any], Action]

START: Sequence[Row] = (
    ({"run": RunCase.NONE}, Action.BEGIN),
    ({"run": RunCase.LIVE, "fresh": True}, Action.REFUSE_SECOND),
    ({"run": RunCase.LIVE, "changed": True}, Action.REFUSE_CHANGED),
    ({"run": RunCase.LIVE}, Action.ALREADY_RUNNING),
    ({"fresh": True}, Action.BEGIN),
    ({"run": RunCase.FINISHED, "goal_reached": True}, Action.OVER),
    ({"run": RunCase.FAILED, "begun": True, "shards": None}, Action.LOOK_AT_SHARDS),
    ({"shards": Shards.WHOLE, "back": False}, Action.CONTINUE),
    ({"shards": Shards.AWAY, "back": False}, Action.WAIT_FOR_HOSTS),
    ({"saved": None}, Action.READ_CHECKPOINTS),
    ({"saved": SavedCase.DAMAGED, "shards": Shards.WHOLE}, Action.REFUSE_KEPT),
    ({"saved": SavedCase.DAMAGED}, Action.REFUSE_DAMAGED),
    ({"saved": SavedCase.OTHER}, Action.BEGIN_FROM),
    ({"saved": SavedCase.GOOD}, Action.RESUME),
    ({"shards": Shards.WHOLE}, Action.REFUSE_KEPT),
    ({"shards": Shards.AWAY}, Action.WAIT_FOR_HOSTS),
    ({}, Action.BEGIN),
)
RECOVER: Sequence[Row] = (
    ({"run": RunCase.STOPPED}, Action.OVER),
    ({"run": RunCase.FINISHED}, Action.OVER),
    ({"run": RunCase.SILENT}, Action.REFUSE_SILENT),
    ({"run": RunCase.LIVE}, Action.ALREADY_RUNNING),
    ({"shards": None}, Action.LOOK_AT_SHARDS),
    ({"shards": Shards.WHOLE, "back": False}, Action.CONTINUE),
    ({"shards": Shards.EMPTY, "back": False}, Action.CONTINUE),
    ({"shards": Shards.AWAY}, Action.WAIT_FOR_HOSTS),
    ({"saved": None}, Action.READ_CHECKPOINTS),
    ({"saved": SavedCase.GOOD}, Action.RESUME),
    ({"shards": Shards.WHOLE}, Action.REFUSE_KEPT),
    ({}, Action.REFUSE_NOTHING),
)


def decide(table: Sequence[Row], facts: Facts) -> Action:
    return next(
        action
        for conditions, action in table
        if all(getattr(facts, name) == wanted for name, wanted in conditions.items())
    )
