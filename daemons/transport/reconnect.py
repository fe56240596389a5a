"""Logs refused and lost connections, and reconnects where libzmq does not.

A peer that is not running yet, or does not know this daemon's key yet, is normal at first; after
`SAY_S` it is logged. If a gatekeeper has refused the connection, or the stream was invalid (a bit
flip in a frame length), libzmq never reconnects: that takes a new socket.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from daemons.transport import socket_events
from dlctl.machine import Reconnected
from dlctl.roles.protocol.authz import COME_LATER

SAY_S = 3.0
"""A peer that refuses connections for this long is logged; then again every `AGAIN_S`."""
AGAIN_S = 60.0
SURE_S = 0.1
"""If libzmq reconnects on its own, it reports that much sooner than this after a disconnect."""
_FAILED = {
    int(zmq.Event.HANDSHAKE_FAILED_AUTH): "it does not know this daemon's key",
    int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL): "it has not the expected key",
    int(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL): "it has not the expected key",
}
_LATER = "too many connections with this daemon's key, or it has not loaded its keys yet"
_NO_KEYS = "another program listens there"
"""If the connections of this run have no keys."""
_ENDED = int(zmq.Event.DISCONNECTED)
_SUCCEEDED = int(zmq.Event.HANDSHAKE_SUCCEEDED)
_CONTINUES = {int(zmq.Event.CONNECT_RETRIED), _SUCCEEDED}
"""libzmq reconnects on its own, or has done so."""
_EVENTS = sum(_FAILED) | _ENDED | sum(_CONTINUES)

log = logging.getLogger(__name__)
Socket = zmq.Socket[bytes]


class Target(NamedTuple):
    """The peer of a connection."""

    peer: str
    address: str
    key: str


@dataclass(slots=True)
class _Link:
    """A watched socket."""

    socket: Socket
    target: Target
    is_open: bool = False
    """Whether its connection is established."""
    ended_at: float = math.inf
    """Since when libzmq does not re-establish it."""
    lost_at: float | None = None
    """When the connection before was lost: messages sent until then may be lost, too."""


class Handshakes:
    def __init__(self, poller: zmq.Poller) -> None:
        self.poller = poller
        self._links: dict[Socket, _Link] = {}
        """By monitor."""
        self._refusals: dict[str, tuple[float, float]] = {}
        """Peer -> (since when every attempt has failed, when to log it)."""
        self._reconnected: dict[str, Reconnected] = {}
        """Peer -> report that is not taken yet."""

    def watch(self, socket: Socket, target: Target) -> None:
        monitor = socket_events.monitor(socket, _EVENTS)
        self._links[monitor] = _Link(socket, target)
        self.poller.register(monitor, zmq.POLLIN)

    def forget(self, socket: Socket) -> None:
        for monitor, link in list(self._links.items()):
            if link.socket is socket:
                self.poller.unregister(monitor)
                del self._links[monitor]
                self._reconnected.pop(link.target.peer, None)
                socket_events.stop(socket, monitor)

    def replaced(self, peer: str) -> None:
        """The peer has a new socket: messages queued in the old one are lost."""
        for link in self._links.values():
            if link.target.peer == peer:
                link.lost_at = time.monotonic()

    def look(self, monitor: Socket) -> bool:
        """Handle the events of a monitor; False if this socket is not a monitor."""
        link = self._links.get(monitor)
        while link is not None and monitor.poll(0):
            self._take(link, *socket_events.receive(monitor))
        return link is not None

    def take_ended(self) -> list[Target]:
        """Peers that need a new socket to reconnect."""
        # libzmq may have reconnected since, while the daemon was busy.
        for monitor in self._links:
            self.look(monitor)
        latest = time.monotonic() - SURE_S
        return [link.target for link in self._links.values() if link.ended_at <= latest]

    def take_reconnected(self) -> list[Reconnected]:
        """Peers whose TCP connection was lost and re-established since the last call."""
        taken, self._reconnected = self._reconnected, {}
        return list(taken.values())

    def _take(self, link: _Link, event: int, value: int) -> None:
        target, now = link.target, time.monotonic()
        # Where libzmq continues, a new socket would lose in-flight messages.
        link.ended_at = math.inf if event in _CONTINUES else min(link.ended_at, now)
        if event == _SUCCEEDED:
            self._refusals.pop(target.peer, None)
            link.is_open = True
            if link.lost_at is not None:
                self._reconnected[target.peer] = Reconnected(target.peer, link.lost_at)
                link.lost_at = None
        elif event == _ENDED and link.is_open:
            link.is_open, link.lost_at = False, now
        elif event in _FAILED:
            why = _FAILED[event] if value != COME_LATER else _LATER
            self._note_refusal(target, why if target.key else _NO_KEYS, now)

    def _note_refusal(self, target: Target, why: str, now: float) -> None:
        since, say_at = self._refusals.setdefault(target.peer, (now, now + SAY_S))
        if now >= say_at:
            self._refusals[target.peer] = since, now + AGAIN_S
            where, seconds = f"{target.peer} at {target.address}", now - since
            log.warning("%s has refused every connection for %.0f s: %s", where, seconds, why)
