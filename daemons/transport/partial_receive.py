"""Has a machine hear of large messages of one kind while they come."""

from __future__ import annotations

from collections.abc import Callable

from daemons.transport.chunking import Arriving
from dlctl import wire
from dlctl.errors import RemoteProtocolError
from dlctl.machine import Coming, Peer
from dlctl.messages import Message


class PartialReceive:
    def __init__(self, kind: type[Message], tell: Callable[[Coming], None]) -> None:
        """`kind`: its large fields are arrays, so that nothing of it is copied."""
        self._kind = kind
        self._tell = tell

    def look(self, peer: Peer, identity: str, arriving: Arriving) -> None:
        """More has come over a connection. What is to be refused is refused when all of it has."""
        if arriving.message is None and arriving.is_of_interest:
            arriving.message = self._read(arriving.frames)
            arriving.is_of_interest = arriving.message is not None
        if arriving.message is not None:
            self._tell(Coming(peer, arriving.message, tuple(arriving.come[1:]), identity))

    def _read(self, frames: wire.Frames) -> Message | None:
        try:
            return wire.decode(frames) if wire.kind(frames) is self._kind else None
        except RemoteProtocolError:
            return None
