"""The contract of every role: events in, effects out, time as an argument.

A machine never reads a clock, opens a socket, starts a thread or draws a random number. A driver
(`daemons/loop.py` with real sockets, `dlctl/sim/world.py` in virtual time) feeds it events and
performs the effects it returns, in their order. The result of an effect comes back as an event.
That is what makes a run replayable from a seed and every role testable without sleeping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Protocol

from dlctl.util.record import Record, record
from dlctl.wire.messages import Message

Peer = str | bytes
"""The other end of a message. A name ("coordinator", "server-0") for connections that this machine
opened with `Connect`; otherwise the opaque id of an incoming connection, good for replies only. It
is not an identity: a peer is identified by its key (`Received.identity`), or else by its messages.
"""


class Event(Record):
    """The input of a machine: something that happened."""

    __slots__ = ()


class Effect(Record):
    """The output of a machine: an action for its driver."""

    __slots__ = ()


class Machine(Protocol):
    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle one event at time `now` (seconds on a monotonic clock) and return the effects."""
        ...

    def deadline(self) -> float | None:
        """When to deliver `DeadlineReached` if nothing else happens; None: never."""
        ...


# ---------------------------------------------------------------- events every role may get


@record
class Started(Event):
    """The driver is ready; sockets are open."""


@record
class Received(Event):
    peer: Peer
    message: Message
    identity: str = ""
    """The name that belongs to the sender's key; "" on connections without keys: unix sockets that
    only this user can connect to."""


@record
class Coming(Event):
    """Part of a large message has arrived; `Received` follows if all of it does, with arrays in the
    same memory. A machine may ignore it.
    """

    peer: Peer
    message: Message
    come: tuple[int, ...]
    """The number of valid bytes of each array, from the front; the others are undefined."""
    identity: str = ""


@record
class Reconnected(Event):
    """A connection that this machine opened was closed and replaced by another one, which the peer
    knows by another id. Not every transport reports this.
    """

    peer: str
    lost_at: float
    """Messages sent until then may be lost, and their answers are lost. Later messages are still
    in flight.
    """


@record
class DeadlineReached(Event):
    """The time returned by `deadline()` is reached."""


@record
class StopRequested(Event):
    """Shut down in an orderly way: on SIGTERM or SIGINT, or because the run is over."""

    reason: str
    at_once: bool = False
    """Only terminate the processes: state drained or saved now could not be found later."""


# ---------------------------------------------------------------- effects every role may want


@record
class Send(Effect):
    """Send and forget. A transport may lose, repeat or reorder it: the roles handle that."""

    peer: Peer
    message: Message


@record
class Connect(Effect):
    """From now on messages to `peer` go to `address`, whose listener must have this public key."""

    peer: str
    address: str
    key: str = ""
    """"": a connection without keys."""


@record
class Admit(Effect):
    """From now on only peers with one of these public keys may connect here: key -> name."""

    names: Mapping[str, str]


@record
class Mute(Effect):
    """For a while, drop all messages from the peer with this name's key."""

    name: str
    for_s: float


@record
class Note(Effect):
    """A line for the log. `fields` are plain values."""

    level: str
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@record
class Configure(Effect):
    """A setting that only the driver can apply (the log level)."""

    key: str
    value: Any


@record
class Exit(Effect):
    """Exit this process after all earlier effects in the list."""

    code: int
    reason: str
