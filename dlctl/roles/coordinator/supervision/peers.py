"""Sends all workers the list of peers: their slots, terms and addresses.

Every list has a number, and the newest counts. A worker receives it before it starts to train, and
whenever a worker joins, leaves, dies or is replaced. Many such changes in a row are in one list:
after it was sent to many workers there is a pause.
"""

from __future__ import annotations

import re

from dlctl.errors import RemoteProtocolError
from dlctl.roles.coordinator.members.membership import Daemon
from dlctl.roles.coordinator.run_state import Control, RunState
from dlctl.roles.coordinator.supervision.groups import LOST
from dlctl.wire import messages as m
from dlctl.wire.machine import Peer

_TCP = re.compile(
    r"tcp://(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9]{1,15})?\]):([0-9]{1,5})"
)
_OTHER = re.compile(r"(?:ipc|sim)://[^\x00-\x1f\x7f]+")
"""Sockets of this machine, and the simulator's."""
_OTHER_BYTES_MAX = 6 + 107
"""The kernel's limit for the path of a socket."""


def is_address(text: str) -> bool:
    """Whether workers may be asked to connect there. libzmq would accept port 99999 as well, and
    raises for unknown schemes: one worker's message could crash all others.
    """
    if found := _TCP.fullmatch(text):
        return 1 <= int(found[1]) <= 65535
    is_short = len(text.encode(errors="replace")) <= _OTHER_BYTES_MAX
    return is_short and _OTHER.fullmatch(text) is not None


FEW = 8
"""Up to so many receivers there is no pause after a list."""
PAUSE_S = 0.002
"""The pause for each receiver: with 50 of them at most ten lists a second."""
_SHOWN = ("_state", "model_ready", "drained", "term", "address", "asked_for_data")


class PeerLists:
    def __init__(self, run: RunState, control: Control) -> None:
        self.run = run
        self.control = control
        shape = run.algorithm.shape
        self.has_links = "peers" in shape.links
        self._keeps_drained = shape.model == "mean" or shape.serves_on
        """Drained workers stay on the list: their models are part of the run's, or they answer."""
        has_model = bool({"peers", "memory"} & shape.links) and shape.model != "tables"
        self._hands_on = has_model and "group" not in shape.links
        """A joining worker gets its model from those that take part."""
        self._changes = run.members.follow(_SHOWN, "worker")
        self._is_stale = True
        self._pause_until = 0.0
        self._has_members = False
        self._list: tuple[tuple[int, int, str, bool], ...] | None = None
        """Slot, term, address, and whether it takes part."""

    def on_listening(self, peer: Peer, message: m.Listening, now: float) -> None:
        """Record the address of a worker. Raises RemoteProtocolError if it is invalid, or if the
        method has no links between workers.
        """
        if not self.has_links or not is_address(message.address):
            raise RemoteProtocolError("workers cannot be asked to connect to this address")
        worker = self.run.members.worker(message.slot, message.term)
        if worker is None or worker.peer != peer:
            return
        worker.address = message.address
        self.run.context.send(peer, m.ListeningNoted(message.slot, message.term))
        self.advance(now)

    def advance(self, now: float) -> None:
        """Send the list if it has changed: also a worker that was not on it before gets it."""
        slots = self.run.members.live_slots()
        self._has_members |= bool(slots)
        if self._hands_on and self._has_members and not slots and self.run.shutdown is None:
            self.control.end("failed", LOST, now, at_once=True)
            return
        for worker in self._changes.take():
            self._is_stale = True
            if not _hears(worker):
                self.run.context.retries.drop(("peers", worker.name))
        if self._is_stale and now >= self._pause_until:
            self._is_stale = False
            self._send(frozenset(slots), now)

    def deadline(self) -> float | None:
        """When the next list may be sent."""
        return self._pause_until if self._is_stale else None

    def _send(self, slots: frozenset[int], now: float) -> None:
        receivers = [worker for worker in self.run.members.of_role("worker") if _hears(worker)]
        rows = tuple(
            (d.index, d.term, d.address, d.index in slots)
            for d in receivers
            if self._keeps_drained or not d.drained
        )
        if rows == self._list:
            return
        self._list = rows
        message = self._message()
        for worker in receivers:
            self.run.context.ask(("peers", worker.name), worker.name, message, now)
        self._pause_until = now + (len(receivers) * PAUSE_S if len(receivers) > FEW else 0.0)

    def _message(self) -> m.Peers:
        """The list; workers ignore one of a lower number."""
        keyring = self.run.keyring
        columns = zip(*self._list, strict=True) if self._list else ((), (), (), ())
        slots, terms, addresses, take_part = columns
        joining = tuple(slot for slot, at_work in zip(slots, take_part, strict=True) if not at_work)
        keys = tuple(keyring.public(f"worker-{slot}") if self.has_links else "" for slot in slots)
        number = self.run.context.next_number()
        return m.Peers(number, slots, joining, terms, addresses, keys)


def _hears(worker: Daemon) -> bool:
    return worker.alive and worker.model_ready
