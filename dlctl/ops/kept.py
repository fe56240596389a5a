"""The shard states that a run's servers store in memory or on disk, as other processes see them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from dlctl.errors import DlctlError
from dlctl.runs.snapshot import Snapshot

if TYPE_CHECKING:
    from dlctl.config import Servers


def shards(snapshot: Snapshot) -> int:
    """The number of shards with a stored state."""
    from dlctl.runs import kept_shards  # imported late, here and below: it pulls in numpy

    servers = _servers(snapshot)
    return 0 if servers is None else len(kept_shards.kept(snapshot.directory, servers))


def remove(snapshot: Snapshot) -> None:
    """Remove the states left by killed servers; a state that a live server has open stays."""
    from dlctl.runs import kept_shards

    servers = _servers(snapshot)
    if servers is not None:
        kept_shards.remove(snapshot.directory, servers)


def _servers(snapshot: Snapshot) -> Servers | None:
    """None if the job is of another version."""
    from dlctl.ops import remains

    with suppress(DlctlError):
        return remains.read_jobfile(snapshot.directory).servers
    return None
