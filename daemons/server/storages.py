"""Chooses where a server stores its shard, as configured in the job."""

from __future__ import annotations

from pathlib import Path

from daemons.server.disklog import DiskLog
from daemons.server.statefile import StateFile
from dlctl.job.config import Servers
from dlctl.runs import kept_shards
from dlctl.shards.base import Storages
from dlctl.shards.log import Point
from dlctl.shards.memory import InMemory


def choose_storages(run_directory: Path, servers: Servers, point: Point) -> Storages:
    """The storages of one server of this run. Nothing is opened yet."""
    if servers.durability == "none":
        return InMemory()
    places = kept_shards.places(run_directory, servers)
    return (DiskLog if servers.durability == "disk" else StateFile)(places, point)
