"""The states of a daemon, and the table of transitions between them.

    pending -> starting -> running <-> slow
    running -> draining                             a worker that leaves in order
    any of these -> stopped or failed -> backoff -> starting
    failed -> quarantined                           a worker whose results are useless

A state belongs to a name, across all processes of that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PENDING = "pending"
"""No process has been started yet."""
STARTING = "starting"
"""The process is starting, and is not ready yet."""
RUNNING = "running"
SLOW = "slow"
"""Its heartbeat is late, or reports that it is stuck in one batch."""
DRAINING = "draining"
"""It pushes what it has, and takes no more data."""
BACKOFF = "backoff"
"""It has ended, and is restarted after a pause."""
STOPPED = "stopped"
FAILED = "failed"
QUARANTINED = "quarantined"
"""It has ended and is not restarted; the run continues without it."""

STATES = frozenset(
    (PENDING, STARTING, RUNNING, SLOW, DRAINING, BACKOFF, STOPPED, FAILED, QUARANTINED)
)
ALIVE = frozenset((STARTING, RUNNING, SLOW, DRAINING))
"""A process exists, if the records are current."""
AT_WORK = frozenset((RUNNING, SLOW))
ENDED = frozenset((STOPPED, FAILED))


class ImpossibleTransition(AssertionError):
    """A bug of the coordinator: no message or exit of a daemon can cause it."""


@dataclass(frozen=True, slots=True)
class Transition:
    sources: frozenset[str]
    target: str


START, WORK, FALL_SILENT, RECOVER, DRAIN = "start", "work", "fall silent", "recover", "drain"
EXIT, DIE, BACK_OFF, RENEW = "exit", "die", "back off", "renew"
QUARANTINE, GIVE_UP, CANCEL = "quarantine", "give up", "cancel"

TRANSITIONS: Mapping[str, Transition] = {
    # An earlier process, if any, has been replaced, or was started by an earlier coordinator.
    START: Transition(STATES, STARTING),
    # Its agent has registered, its server serves, its worker has asked for data.
    WORK: Transition(ALIVE, RUNNING),
    FALL_SILENT: Transition(AT_WORK, SLOW),
    RECOVER: Transition(AT_WORK, RUNNING),
    DRAIN: Transition(ALIVE, DRAINING),
    # With code 0, or as requested; in any other way.
    EXIT: Transition(ALIVE, STOPPED),
    DIE: Transition(ALIVE, FAILED),
    BACK_OFF: Transition(ENDED, BACKOFF),
    # The run has a new key: all processes that have the old one are replaced.
    RENEW: Transition(STATES - {QUARANTINED}, BACKOFF),
    QUARANTINE: Transition(ENDED, QUARANTINED),
    # Its host, or its shard, is lost.
    GIVE_UP: Transition(STATES, FAILED),
    # The run ends before its next process was started.
    CANCEL: Transition(frozenset((PENDING, BACKOFF)), STOPPED),
}
"""Event -> the states in which it may occur, and the state that follows."""


def after(state: str, event: str) -> str:
    """The state that follows. Raises ImpossibleTransition."""
    transition = TRANSITIONS[event]
    if state not in transition.sources:
        raise ImpossibleTransition(f'"{event}" cannot follow on the state "{state}"')
    return transition.target
