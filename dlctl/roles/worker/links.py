"""The peers of a replica, and its identity toward them."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlctl.roles.protocol.context import Context
from dlctl.roles.worker.flights import Flights
from dlctl.roles.worker.members import PeerMembers
from dlctl.roles.worker.send_queue import SendQueue
from dlctl.roles.worker.shard_client import Identity, ShardClient


@dataclass(frozen=True, eq=False, slots=True)
class Links:
    """The connections of a replica that has joined its run."""

    context: Context
    identity: Identity
    tables: list[list[ShardClient]]
    """The clients of each table of the method, in the order of their shards; [] without servers."""
    send_queue: SendQueue
    members: PeerMembers
    flights: Flights = field(default_factory=Flights)

    @property
    def channels(self) -> list[ShardClient]:
        """The shards of the parameters; none without servers."""
        return self.tables[0] if self.tables else []
