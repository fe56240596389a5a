"""Connections that are refused: libzmq says nothing, so here it is said, and tried again.

A peer that is not there yet, or does not know our key yet, is no news for a while; after `SAY_S` it
is. Whom a gatekeeper has refused, libzmq never connects again: that takes a new socket.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from daemons import monitors

SAY_S = 3.0
"""For so long it is refused before it is said; then again every `AGAIN_S`."""
AGAIN_S = 60.0
_FAILED = {
    int(zmq.Event.HANDSHAKE_FAILED_AUTH): "it does not know our key",
    int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL): "it has another key than it should",
    int(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL): "it has another key than it should",
}
_EVENTS = sum(_FAILED) | int(zmq.Event.HANDSHAKE_SUCCEEDED)

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
        self._refused: dict[str, Target] = {}

    def watch(self, socket: Socket, target: Target) -> None:
        monitor = monitors.monitor(socket, _EVENTS)
        self._by_monitor[monitor] = socket, target
        self.poller.register(monitor, zmq.POLLIN)

    def forget(self, socket: Socket) -> None:
        for monitor, (watched, target) in list(self._by_monitor.items()):
            if watched is socket:
                self.poller.unregister(monitor)
                del self._by_monitor[monitor]
                self._refused.pop(target.peer, None)
                monitors.stop(socket, monitor)

    def look(self, monitor: Socket) -> bool:
        """Take the news of a monitor; False if this socket is none."""
        if monitor not in self._by_monitor:
            return False
        _, target = self._by_monitor[monitor]
        while monitor.poll(0):
            self._take(target, int(recv_monitor_message(monitor)["event"]))
        return True

    def take_refused(self) -> list[Target]:
        """Who has to be connected again, with a new socket."""
        targets, self._refused = [*self._refused.values()], {}
        return targets

    def _take(self, target: Target, event: int) -> None:
        if event not in _FAILED:
            self._refusals.pop(target.peer, None)
            return
        self._refused[target.peer] = target
        now = time.monotonic()
        found = self._refusals.setdefault(target.peer, _Refusals(now, now + SAY_S))
        if now >= found.say_at:
            found.say_at = now + AGAIN_S
            where, seconds = f"{target.peer} at {target.address}", now - found.since
            why = _FAILED[event]
            log.warning("%s has refused every connection for %.0f s: %s", where, seconds, why)
