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

from dlctl.messages import Message
from dlctl.util.record import Record, record

Peer = str | bytes
"""Whom a message is from or for. A name ("coordinator", "server-0") for connections this machine
asked for with `Connect`; otherwise the opaque id of an incoming connection, good for replies only.
It is no identity: who a peer is, its key says (`Received.identity`), or else its messages."""


class Event(Record):
    """Something that happened, told to a machine."""

    __slots__ = ()


class Effect(Record):
    """Something that a machine wants done, told to its driver."""

    __slots__ = ()


class Machine(Protocol):
    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event at time `now` (seconds on a monotonic clock) and say what to do."""
        ...

    def deadline(self) -> float | None:
        """When to be called with `DeadlineReached` if nothing else happens; None: never."""
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
    """The name that belongs to the sender's key; "" on connections without keys: unix sockets, to
    which only this user comes."""


@record
class Coming(Event):
    """Part of a large message has come; `Received` follows if all of it does, with arrays in the
    same memory. Nobody needs to take notice of it.
    """

    peer: Peer
    message: Message
    come: tuple[int, ...]
    """Of each array, how many bytes are there, from the front to the back; others are anything."""
    identity: str = ""


@record
class Reconnected(Event):
    """A connection that this machine asked for has ended, and there is another one, which the peer
    knows by another id. Not every transport notices.
    """

    peer: str
    lost_at: float
    """What was sent until then may be lost, and what would have answered it is. What was sent later
    is still coming.
    """


@record
class DeadlineReached(Event):
    """The time that `deadline()` named has come."""


@record
class StopRequested(Event):
    """Come to an orderly end: on SIGTERM or SIGINT, or because the run is over."""

    reason: str
    at_once: bool = False
    """Only end the processes: what was drained or saved now, nobody could find."""


# ---------------------------------------------------------------- effects every role may want


@record
class Send(Effect):
    """Send and forget. A transport may lose, repeat or reorder it: the roles repair that."""

    peer: Peer
    message: Message


@record
class Connect(Effect):
    """From now on messages to `peer` go to `address`, where somebody must have this public key."""

    peer: str
    address: str
    key: str = ""
    """"": a connection without keys."""


@record
class Admit(Effect):
    """From now on only who has one of these public keys may connect here: key -> name."""

    names: Mapping[str, str]


@record
class Hush(Effect):
    """For a while nothing is to be heard of whoever has this name's key."""

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
    """A setting that only the driver can put in force (the log level)."""

    key: str
    value: Any


@record
class Exit(Effect):
    """End this process after everything before it in the list was done."""

    code: int
    reason: str
