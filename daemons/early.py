"""Has a machine hear of large messages of one kind while they come."""

from __future__ import annotations

from collections.abc import Callable

from daemons.segments import Arriving
from dlctl import wire
from dlctl.errors import RemoteProtocolError
from dlctl.machine import Coming, Peer
from dlctl.messages import Message

_OTHER = "of no interest"


class Early:
    def __init__(self, kind: type[Message], tell: Callable[[Coming], None]) -> None:
        """`kind`: its large fields are arrays, so that nothing of it is copied."""
        self._kind = kind
        self._tell = tell

    def look(self, peer: Peer, identity: str, arriving: Arriving) -> None:
        """More has come over a connection. What is to be refused is refused when all of it has."""
        if arriving.message is None:
            arriving.message = self._read(arriving)
        if isinstance(arriving.message, self._kind):
            come = tuple(arriving.come[1:])
            self._tell(Coming(peer, arriving.message, come, identity))

    def _read(self, arriving: Arriving) -> object:
        try:
            if wire.kind(arriving.frames) is self._kind:
                return wire.decode(arriving.frames)
        except RemoteProtocolError:
            pass
        return _OTHER
