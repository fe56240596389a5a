"""The life of a daemon: its states, and the one table of what may lead from which to which.

    pending -> starting -> running <-> slow
    running -> draining                             a worker that leaves in order
    any of these -> stopped or failed -> backoff -> starting
    failed -> quarantined                           a worker that computes nothing of use

A state belongs to a name and goes on from one process of that name to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PENDING = "pending"
"""No process has been started yet."""
STARTING = "starting"
"""There is a process, or will be in a moment; it does not work yet."""
RUNNING = "running"
SLOW = "slow"
"""Its heartbeat is late, or says that it is stuck in one batch."""
DRAINING = "draining"
"""It pushes what it has, and takes no more data."""
BACKOFF = "backoff"
"""It has ended, and is started again after a pause."""
STOPPED = "stopped"
FAILED = "failed"
QUARANTINED = "quarantined"
"""It has ended and is not started again; the run goes on without it."""

STATES = frozenset(
    (PENDING, STARTING, RUNNING, SLOW, DRAINING, BACKOFF, STOPPED, FAILED, QUARANTINED)
)
ALIVE = frozenset((STARTING, RUNNING, SLOW, DRAINING))
"""There is a process, as far as is known."""
AT_WORK = frozenset((RUNNING, SLOW))
ENDED = frozenset((STOPPED, FAILED))


class ImpossibleTransition(AssertionError):
    """A bug of the coordinator: nothing that a daemon says or does can lead there."""


@dataclass(frozen=True, slots=True)
class Transition:
    sources: frozenset[str]
    target: str


START, WORK, FALL_SILENT, RECOVER, DRAIN = "start", "work", "fall silent", "recover", "drain"
EXIT, DIE, BACK_OFF, RENEW = "exit", "die", "back off", "renew"
QUARANTINE, GIVE_UP, CANCEL = "quarantine", "give up", "cancel"

TRANSITIONS: Mapping[str, Transition] = {
    # A process of before, if there is one, has been replaced, or was another coordinator's.
    START: Transition(STATES, STARTING),
    # Its agent has registered, its server serves, its worker has asked for data.
    WORK: Transition(ALIVE, RUNNING),
    FALL_SILENT: Transition(AT_WORK, SLOW),
    RECOVER: Transition(AT_WORK, RUNNING),
    DRAIN: Transition(ALIVE, DRAINING),
    # With code 0, or as it was told; in any other way.
    EXIT: Transition(ALIVE, STOPPED),
    DIE: Transition(ALIVE, FAILED),
    BACK_OFF: Transition(ENDED, BACKOFF),
    # The run has a new key: whatever lives with the old one is replaced.
    RENEW: Transition(STATES - {QUARANTINED}, BACKOFF),
    QUARANTINE: Transition(ENDED, QUARANTINED),
    # Its host, or its shard, is lost for good.
    GIVE_UP: Transition(STATES, FAILED),
    # The run ends before its next process was started.
    CANCEL: Transition(frozenset((PENDING, BACKOFF)), STOPPED),
}
"""Event -> from where it may come, and where it leads."""


def after(state: str, event: str) -> str:
    """The state that follows. Raises ImpossibleTransition."""
    transition = TRANSITIONS[event]
    if state not in transition.sources:
        raise ImpossibleTransition(f'"{event}" cannot follow on the state "{state}"')
    return transition.target
