"""The states of a daemon, and the table of transitions between them.

    pending -> starting -> running <-> slow
    running -> draining                             a worker that leaves in order
    any of these -> stopped or failed -> backoff -> starting
    failed -> quarantined                           a worker that a restart does not help
    pending, backoff, stopped, failed -> queued -> starting   a worker that has no host yet, or now

A state belongs to a name, across all processes of that name.
"""

from __future__ import annotations

from collections.abc import Mapping

PENDING = "pending"
"""No process has been started yet."""
QUEUED = "queued"
"""The owner of the worker's host (a batch system) has not given it yet, or has taken it back."""
STARTING = "starting"
"""The process is starting, and is not ready yet."""
RUNNING = "running"
SLOW = "slow"
"""The daemon's heartbeat is late, or reports that it is stuck in one batch."""
DRAINING = "draining"
"""The worker pushes what it has, and takes no more data."""
BACKOFF = "backoff"
"""The process has exited, and is restarted after a pause."""
STOPPED = "stopped"
FAILED = "failed"
QUARANTINED = "quarantined"
"""The process has exited and is not restarted; the run continues without it."""

STATES = frozenset(
    (PENDING, QUEUED, STARTING, RUNNING, SLOW, DRAINING, BACKOFF, STOPPED, FAILED, QUARANTINED)
)
ALIVE = frozenset((STARTING, RUNNING, SLOW, DRAINING))
"""A process exists, if the records are current."""
AT_WORK = frozenset((RUNNING, SLOW))
ENDED = frozenset((STOPPED, FAILED))
HOSTLESS = frozenset((PENDING, QUEUED))
"""It is started as soon as its agent has registered."""
UNSTARTED = HOSTLESS | {BACKOFF}
"""It has no process, and is to get one."""


SOURCES: Mapping[str, frozenset[str]] = {
    # Its agent waits for a host; or its host was taken back, and its process has ended.
    QUEUED: ENDED | UNSTARTED,
    # An earlier process, if any, has been replaced, or was started by an earlier coordinator.
    STARTING: STATES,
    # Its agent has registered, its server serves, its worker has asked for data.
    RUNNING: ALIVE,
    SLOW: AT_WORK,
    DRAINING: ALIVE,
    # It has exited with code 0, or as requested; or the run ends before its next process started.
    STOPPED: ALIVE | UNSTARTED,
    # It has exited in any other way; or its host, or its shard, is lost.
    FAILED: STATES,
    # It has ended; or the run has a new key, and all processes that have the old one are replaced.
    BACKOFF: STATES - {QUARANTINED},
    QUARANTINED: ENDED,
}
"""State -> the states that it may follow on."""
