"""The id of an incoming connection: the name that belongs to its key, and ZeroMQ's routing id.

The id contains the name, so no table of connections is needed.
"""

from __future__ import annotations

from dlctl.wire.machine import Peer

_END = b"\0"
"""Ends the name: names never contain it, ZeroMQ's ids may."""


def connection(name: str, route: bytes) -> bytes:
    """`name`: "" if connections have no keys; `route`: ZeroMQ's routing id."""
    return name.encode() + _END + route


def owner(peer: bytes) -> bytes:
    """The name that belongs to a connection's key, or the connection itself if it has no key."""
    return peer.partition(_END)[0] or peer


def address(peer: Peer) -> list[bytes]:
    """The frames before a message that select one of a listener's connections."""
    return [peer.partition(_END)[2]] if isinstance(peer, bytes) else []
