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

import zmq

from daemons.transport import socket_events
from dlctl.roles.protocol.authz import COME_LATER
from dlctl.wire.machine import Reconnected

SAY_S = 3.0
"""A peer that refuses connections for this long is logged; then again every `AGAIN_S`."""
AGAIN_S = 60.0
SURE_S = 0.1
"""The longest time from a disconnect in which libzmq reconnects on its own."""
_FAILED = {
    int(zmq.Event.HANDSHAKE_FAILED_AUTH): "it does not know this daemon's key",
    int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL): "it has not the expected key",
    int(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL): "it has not the expected key",
}
_LATER = "too many connections with this daemon's key, or it has not loaded its keys yet"
_NO_KEYS = "another program listens there"
"""The cause of a failed handshake if the connections of this run have no keys."""
_ENDED = int(zmq.Event.DISCONNECTED)
_SUCCEEDED = int(zmq.Event.HANDSHAKE_SUCCEEDED)
_CONTINUES = {int(zmq.Event.CONNECT_RETRIED), _SUCCEEDED}
"""libzmq reconnects on its own, or has done so."""
_EVENTS = sum(_FAILED) | _ENDED | sum(_CONTINUES)

log = logging.getLogger(__name__)
Socket = zmq.Socket[bytes]


@dataclass(slots=True)
class ReconnectingSocket:
    """A watched socket, and what it connects to."""

    socket: Socket
    peer: str
    address: str
    key: str
    lost_at: float | None = None
    """When the connection before was lost: messages sent until then may be lost, too."""
    is_open: bool = False
    """Whether its connection is established."""
    ended_at: float = math.inf
    """Since when libzmq does not re-establish it."""


class Handshakes:
    def __init__(self, poller: zmq.Poller) -> None:
        self.poller = poller
        self._links: dict[Socket, ReconnectingSocket] = {}
        """Monitor socket -> the connection that it observes."""
        self._refusals: dict[str, tuple[float, float]] = {}
        """Peer -> (since when every attempt has failed, when to log it)."""

    def watch(self, link: ReconnectingSocket) -> None:
        monitor = socket_events.monitor(link.socket, _EVENTS)
        self._links[monitor] = link
        self.poller.register(monitor, zmq.POLLIN)

    def forget(self, socket: Socket) -> None:
        for monitor, link in list(self._links.items()):
            if link.socket is socket:
                self.poller.unregister(monitor)
                del self._links[monitor]
                socket_events.stop(socket, monitor)

    def look(self, monitor: Socket) -> list[Reconnected] | None:
        """Handle the events of a monitor. Returns a report for each time that its TCP connection
        was lost and re-established; None if this socket is not a monitor.
        """
        if (link := self._links.get(monitor)) is None:
            return None
        reports: list[Reconnected] = []
        while monitor.poll(0):
            self._take(link, *socket_events.receive(monitor), reports)
        return reports

    def ended(self) -> list[ReconnectingSocket]:
        """Connections that need a new socket. One with unread events is left out: libzmq may have
        reconnected since, while the daemon was busy.
        """
        latest = time.monotonic() - SURE_S
        links = self._links.items()
        return [link for monitor, link in links if link.ended_at <= latest and not monitor.poll(0)]

    def _take(
        self, link: ReconnectingSocket, event: int, value: int, reports: list[Reconnected]
    ) -> None:
        now = time.monotonic()
        # Where libzmq continues, a new socket would lose in-flight messages.
        link.ended_at = math.inf if event in _CONTINUES else min(link.ended_at, now)
        if event == _SUCCEEDED:
            self._refusals.pop(link.peer, None)
            link.is_open = True
            if link.lost_at is not None:
                reports.append(Reconnected(link.peer, link.lost_at))
                link.lost_at = None
        elif event == _ENDED and link.is_open:
            link.is_open, link.lost_at = False, now
        elif event in _FAILED:
            why = _FAILED[event] if value != COME_LATER else _LATER
            self._note_refusal(link, why if link.key else _NO_KEYS, now)

    def _note_refusal(self, link: ReconnectingSocket, why: str, now: float) -> None:
        since, say_at = self._refusals.setdefault(link.peer, (now, now + SAY_S))
        if now >= say_at:
            self._refusals[link.peer] = since, now + AGAIN_S
            where, seconds = f"{link.peer} at {link.address}", now - since
            log.warning("%s has refused every connection for %.0f s: %s", where, seconds, why)
