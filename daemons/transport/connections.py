"""What a machine calls a connection that has come in: the name that belongs to its key, and
ZeroMQ's id of it.

With the name in it nobody has to remember whose connection it is, however many come and go.
"""

from __future__ import annotations

from dlctl.machine import Peer

_END = b"\0"
"""Of the name: names have none of these, ZeroMQ's ids may."""


def connection(name: str, route: bytes) -> bytes:
    """`name`: "" if connections have no keys here; `route`: what ZeroMQ calls it."""
    return name.encode() + _END + route


def owner(peer: bytes) -> bytes:
    """The name that belongs to a connection's key, or the connection itself if it has no key."""
    return peer.partition(_END)[0] or peer


def address(peer: Peer) -> list[bytes]:
    """The frames that go before a message: which one of a listener's connections it is for."""
    return [peer.partition(_END)[2]] if isinstance(peer, bytes) else []
