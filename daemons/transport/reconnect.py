"""Logs refused and lost connections, and reconnects where libzmq does not.

A peer that is not running yet, or does not know this daemon's key yet, is normal at first; after
`SAY_S` it is logged. If a gatekeeper has refused the connection, or the stream was invalid (a bit
flip in a frame length), libzmq never reconnects: that takes a new socket.
"""

from __future__ import annotations

import logging
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
class _Refusals:
    """Every attempt has failed since then."""

    since: float
    say_at: float


class Handshakes:
    def __init__(self, poller: zmq.Poller) -> None:
        self.poller = poller
        self._by_monitor: dict[Socket, tuple[Socket, Target]] = {}
        self._refusals: dict[str, _Refusals] = {}
        self._ended: dict[str, tuple[Target, float]] = {}
        """Peer -> connection that libzmq does not re-establish, if known, and since when."""
        self._open: set[str] = set()
        """Peers whose connection is established."""
        self._lost_at: dict[str, float] = {}
        """Peer -> when its connection was lost: messages sent before may be lost, too."""
        self._reconnected: dict[str, Reconnected] = {}
        """Peer -> report that is not taken yet."""

    def watch(self, socket: Socket, target: Target) -> None:
        monitor = socket_events.monitor(socket, _EVENTS)
        self._by_monitor[monitor] = socket, target
        self.poller.register(monitor, zmq.POLLIN)

    def forget(self, socket: Socket) -> None:
        for monitor, (watched, target) in list(self._by_monitor.items()):
            if watched is socket:
                self.poller.unregister(monitor)
                del self._by_monitor[monitor]
                self._open.discard(target.peer)
                for by_peer in (self._ended, self._lost_at, self._reconnected):
                    by_peer.pop(target.peer, None)
                socket_events.stop(socket, monitor)

    def replaced(self, peer: str) -> None:
        """The peer has a new socket: messages queued in the old one are lost."""
        self._lost_at[peer] = time.monotonic()

    def look(self, monitor: Socket) -> bool:
        """Handle the events of a monitor; False if this socket is not a monitor."""
        if monitor not in self._by_monitor:
            return False
        _, target = self._by_monitor[monitor]
        while monitor.poll(0):
            self._take(target, *socket_events.receive(monitor))
        return True

    def take_ended(self) -> list[Target]:
        """Peers that need a new socket to reconnect."""
        # libzmq may have reconnected since, while the daemon was busy.
        for monitor in self._by_monitor:
            self.look(monitor)
        latest = time.monotonic() - SURE_S
        targets = [target for target, since in self._ended.values() if since <= latest]
        for target in targets:
            del self._ended[target.peer]
        return targets

    def take_reconnected(self) -> list[Reconnected]:
        """Peers whose TCP connection was lost and re-established since the last call."""
        taken, self._reconnected = self._reconnected, {}
        return list(taken.values())

    def _take(self, target: Target, event: int, value: int) -> None:
        if event in _CONTINUES:  # A new socket would lose in-flight messages.
            self._ended.pop(target.peer, None)
        else:
            self._ended.setdefault(target.peer, (target, time.monotonic()))
        if event == _SUCCEEDED:
            self._refusals.pop(target.peer, None)
            self._open.add(target.peer)
            if (lost_at := self._lost_at.pop(target.peer, None)) is not None:
                self._reconnected[target.peer] = Reconnected(target.peer, lost_at)
        elif event == _ENDED and target.peer in self._open:
            self._open.remove(target.peer)
            self._lost_at[target.peer] = time.monotonic()
        elif event in _FAILED:
            why = _FAILED[event] if value != COME_LATER else _LATER
            self._note_refusal(target, why if target.key else _NO_KEYS)

    def _note_refusal(self, target: Target, why: str) -> None:
        now = time.monotonic()
        found = self._refusals.setdefault(target.peer, _Refusals(now, now + SAY_S))
        if now >= found.say_at:
            found.say_at = now + AGAIN_S
            where, seconds = f"{target.peer} at {target.address}", now - found.since
            log.warning("%s has refused every connection for %.0f s: %s", where, seconds, why)
