"""Connections that are refused, or end: libzmq says nothing, so here it is said, and tried again.

A peer that is not there yet, or does not know our key yet, is no news for a while; after `SAY_S` it
is. Where a gatekeeper has refused us, or what came was no message (a bit had flipped in the length
of a frame), libzmq never connects again: that takes a new socket.
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
"""For so long it is refused before it is said; then again every `AGAIN_S`."""
AGAIN_S = 60.0
SURE_S = 0.1
"""Much sooner after the end of a connection libzmq says that it goes on by itself, if it does."""
_FAILED = {
    int(zmq.Event.HANDSHAKE_FAILED_AUTH): "it does not know our key",
    int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL): "it has another key than it should",
    int(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL): "it has another key than it should",
}
_LATER = "too many connections of our key have come to it, or it was not told yet who may come"
_NO_KEYS = "what listens there is none of ours"
"""Where a connection has no keys."""
_ENDED = int(zmq.Event.DISCONNECTED)
_SUCCEEDED = int(zmq.Event.HANDSHAKE_SUCCEEDED)
_GOES_ON = {int(zmq.Event.CONNECT_RETRIED), _SUCCEEDED}
"""libzmq connects again by itself, or has done it."""
_EVENTS = sum(_FAILED) | _ENDED | sum(_GOES_ON)

log = logging.getLogger(__name__)
Socket = zmq.Socket[bytes]


class Target(NamedTuple):
    """Whom a connection is for."""

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
        """Whose connection libzmq does not begin again, as far as we know, and since when."""
        self._open: set[str] = set()
        """Peers whose connection stands."""
        self._lost_at: dict[str, float] = {}
        """Peer -> until when what was sent to it may be lost, as its connection has ended."""
        self._reconnected: dict[str, Reconnected] = {}
        """Peer -> what nobody has taken yet."""

    def watch(self, socket: Socket, target: Target) -> None:
        monitor = socket_events.monitor(socket, _EVENTS)
        self._by_monitor[monitor] = socket, target
        self.poller.register(monitor, zmq.POLLIN)

    def forget(self, socket: Socket) -> None:
        for monitor, (watched, target) in list(self._by_monitor.items()):
            if watched is socket:
                self.poller.unregister(monitor)
                del self._by_monitor[monitor]
                self._ended.pop(target.peer, None)
                self._open.discard(target.peer)
                self._lost_at.pop(target.peer, None)
                self._reconnected.pop(target.peer, None)
                socket_events.stop(socket, monitor)

    def replaced(self, peer: str) -> None:
        """It has another socket now: what still waited in the one before is lost."""
        self._lost_at[peer] = time.monotonic()

    def look(self, monitor: Socket) -> bool:
        """Take the news of a monitor; False if this socket is none."""
        if monitor not in self._by_monitor:
            return False
        _, target = self._by_monitor[monitor]
        while monitor.poll(0):
            self._take(target, *socket_events.receive(monitor))
        return True

    def take_ended(self) -> list[Target]:
        """Who has to be connected again, with a new socket."""
        # What ended may go on since: there was time for it while the daemon did something else.
        for monitor in self._by_monitor:
            self.look(monitor)
        latest = time.monotonic() - SURE_S
        targets = [target for target, since in self._ended.values() if since <= latest]
        for target in targets:
            del self._ended[target.peer]
        return targets

    def take_reconnected(self) -> list[Reconnected]:
        """Who can be reached again, since the last call."""
        taken, self._reconnected = self._reconnected, {}
        return list(taken.values())

    def _take(self, target: Target, event: int, value: int) -> None:
        if event in _GOES_ON:  # Another socket would lose what is on its way.
            self._ended.pop(target.peer, None)
        else:
            self._ended.setdefault(target.peer, (target, time.monotonic()))
        if event == _SUCCEEDED:
            self._refusals.pop(target.peer, None)
            self._note_opened(target.peer)
        elif event == _ENDED and target.peer in self._open:
            self._open.remove(target.peer)
            self._lost_at[target.peer] = time.monotonic()
        elif event in _FAILED:
            why = _FAILED[event] if value != COME_LATER else _LATER
            self._note_refusal(target, why if target.key else _NO_KEYS)

    def _note_opened(self, peer: str) -> None:
        self._open.add(peer)
        lost_at = self._lost_at.pop(peer, None)
        if lost_at is not None:
            self._reconnected[peer] = Reconnected(peer, lost_at)

    def _note_refusal(self, target: Target, why: str) -> None:
        now = time.monotonic()
        found = self._refusals.setdefault(target.peer, _Refusals(now, now + SAY_S))
        if now >= found.say_at:
            found.say_at = now + AGAIN_S
            where, seconds = f"{target.peer} at {target.address}", now - found.since
            log.warning("%s has refused every connection for %.0f s: %s", where, seconds, why)
