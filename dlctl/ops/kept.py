"""What the servers of a run keep of their shards, in memory or on disk, seen from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlctl.runs.snapshot import Snapshot, read_job
from dlctl.util import hints, notes
from dlctl.util.units import short_size

if TYPE_CHECKING:
    from dlctl.config import Servers


def bytes_held(snapshot: Snapshot) -> int:
    """What the states of this run take; 0 if its job cannot be read."""
    from dlctl.runs import kept_shards  # here and below, because it takes numpy along

    servers = _servers(snapshot)
    return 0 if servers is None else kept_shards.bytes_held(snapshot.directory, servers)


def shards(snapshot: Snapshot) -> int:
    """How many shards there are states of."""
    from dlctl.runs import kept_shards

    servers = _servers(snapshot)
    return 0 if servers is None else len(kept_shards.kept(snapshot.directory, servers))


def remove(snapshot: Snapshot) -> None:
    """Remove what servers that were killed have left; what a living one has open stays."""
    from dlctl.runs import kept_shards

    servers = _servers(snapshot)
    if servers is not None:
        kept_shards.remove(snapshot.directory, servers)


def name_what_stays(snapshot: Snapshot) -> None:
    """A run that is left for a new one may still hold memory: only its owner may give it up."""
    held = bytes_held(snapshot)
    if held:
        name = snapshot.run_id
        notes.note(f"the shards of {name} stay, {short_size(held)}")
        remove = hints.told(f"dlctl stop --kill -j {name}", "gives them up")
        notes.next_step(hints.either(f"dlctl recover -j {name}", remove), "  ")


def _servers(snapshot: Snapshot) -> Servers | None:
    """None for a job of another version."""
    from dlctl import config

    try:
        return config.from_dict(config.JobFile, read_job(snapshot.directory)).servers
    except (KeyError, TypeError):
        return None
