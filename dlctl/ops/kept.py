"""What the servers of a run keep of their shards, in memory or on disk, seen from outside."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from dlctl.errors import DlctlError
from dlctl.runs.snapshot import Snapshot

if TYPE_CHECKING:
    from dlctl.config import Servers


def shards(snapshot: Snapshot) -> int:
    """How many shards there are states of."""
    from dlctl.runs import kept_shards  # here and below, because it takes numpy along

    servers = _servers(snapshot)
    return 0 if servers is None else len(kept_shards.kept(snapshot.directory, servers))


def remove(snapshot: Snapshot) -> None:
    """Remove what servers that were killed have left; what a living one has open stays."""
    from dlctl.runs import kept_shards

    servers = _servers(snapshot)
    if servers is not None:
        kept_shards.remove(snapshot.directory, servers)


def _servers(snapshot: Snapshot) -> Servers | None:
    """None for a job of another version."""
    from dlctl.ops import remains

    with suppress(DlctlError):
        return remains.read_jobfile(snapshot.directory).servers
    return None
