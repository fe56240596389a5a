"""Retries: messages are resent until they are answered. The only retry mechanism of all roles.

The transport delivers at most once and may lose in-flight messages when a connection breaks. So
every message that matters is stored here under a key until its answer arrives. The timeout is the
measured round trip of small messages (four times its average, at least `resend_s`) plus the
transfer time of the bytes (four times the latest measurement for that peer, or at 1 MB/s before
one). It doubles with every retry up to a factor of four, but its first part is bounded by the age
at which a message counts as lost. On a slow link a superfluous copy delays everything behind it, so
the estimate of a link is allowed to become as slow as the link is. The first answer after an outage
shows that the peer is reachable again: other messages to it are resent soon. In-flight messages of
a closed connection are resent over the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import count

from dlctl.util.deadlines import Deadlines
from dlctl.wire.machine import Send
from dlctl.wire.messages import Message, PeerRequest, ReadFile, Register

APART = (PeerRequest, ReadFile, Register)
"""Messages that are answered between two steps, or once a disk has done something: their round
trips are measured apart from those of all other messages.
"""
BACKOFF_MAX = 4
PUT_OFF = 8
"""Multiple of `resend_s` for a message that the peer has, but cannot answer yet."""
AGE_S_MAX = 8.0
"""A message that was answered later than this was lost, not slow."""
BYTES_PER_S_FIRST = 1e6
"""Assumed throughput of a link before it is measured."""
MEASURED_BYTES_MIN = 64 * 1024
"""Messages from this size on measure the throughput of a link, smaller ones its latency."""
PATIENCE = 4
"""A resend follows after this multiple of the expected round trip."""
AWAY_S = 3.0
"""A resend that is overdue by more means that this process itself was paused (SIGSTOP), so the
measured time to the answer is not the peer's."""


@dataclass(slots=True)
class _Item:
    key: Hashable
    place: int
    """The position in the order of the first copies."""
    peer: str
    message: Message
    nbytes: int
    first_sent: float
    sent: float
    sent_before: float
    """The time of the copy before the newest one, or of the newest if this process was paused."""
    due: float = 0.0
    copies: int = 0
    backoff: int = 1
    is_held: bool = False
    """Its answer is to be late: it says nothing about the peer, nor about the link."""

    @property
    def kind(self) -> type[Message]:
        """`Message`, or its own type if that is measured apart."""
        return type(self.message) if isinstance(self.message, APART) else Message


class Retries:
    def __init__(self, resend_s: float) -> None:
        self.resend_s = resend_s
        self.repeated = 0
        """Messages resent so far."""
        self._items: dict[Hashable, _Item] = {}
        self._of_peer: dict[str, dict[Hashable, _Item]] = {}
        self._deadlines = Deadlines()
        self._places = count()
        self._round_trip_s: dict[type[Message], float] = {}
        """Kind of a message (`_Item.kind`) -> its expected round trip."""
        self._bytes_per_s: dict[str, float] = {}
        """Peer -> measured throughput, which may fall at once, but at most doubles."""
        self.on_repeat: Callable[[Hashable, int, float], None] = lambda key, nbytes, now: None
        """Called with (key, bytes, now) for every message that is resent."""

    def add(
        self, key: Hashable, peer: str, message: Message, now: float, nbytes: int = 0,
        *, is_held: bool = False,
    ) -> Send:  # fmt: skip
        """Send `message` now, and resend it until `done(key)`. is_held: the peer answers only once
        something has happened, so it is resent seldom, and its time is not a round trip.
        """
        older = self._items.get(key)
        if older is not None:
            del self._of_peer[older.peer][key]
        place = next(self._places) if older is None else older.place
        item = _Item(
            key, place, peer, message, nbytes, now, now, now, due=now, is_held=is_held
        )  # fmt: skip
        self._items[key] = self._of_peer.setdefault(peer, {})[key] = item
        self._rearm(item, now)
        return Send(peer, message)

    def _take(self, key: Hashable) -> _Item | None:
        item = self._items.pop(key, None)
        if item is not None:
            del self._of_peer[item.peer][key]
            self._deadlines.set(key, None)
        return item

    def _set_due(self, item: _Item, due: float) -> None:
        item.due = due
        self._deadlines.set(item.key, due)

    def done(self, key: Hashable, now: float, nbytes: int | None = None) -> float | None:
        """The answer has arrived: seconds since the first copy; None if nothing waited for it.

        nbytes: actual bytes, if they may differ from the expected ones.
        """
        item = self._take(key)
        if item is None:
            return None
        item.nbytes = item.nbytes if nbytes is None else nbytes
        if item.is_held:
            return now - item.first_sent
        # It is unknown which copy was answered, but probably one of the last two. Without this a
        # slow link would cause retries of everything, and never be measured as slow.
        took_s = now - (item.sent if item.copies == 1 else item.sent_before)
        if now <= item.due + AWAY_S:
            self._measure(item, took_s)
        if item.copies > 1:
            self._hurry(item.peer, now)
        return now - item.first_sent

    def _measure(self, item: _Item, took_s: float) -> None:
        known_s = self._round_trip_s.get(item.kind, 0.0)
        if item.nbytes >= MEASURED_BYTES_MIN:
            before = self._bytes_per_s.get(item.peer, PATIENCE * BYTES_PER_S_FIRST)
            self._bytes_per_s[item.peer] = min(item.nbytes / max(took_s, 1e-6), 2 * before)
        elif item.copies == 1:
            weight = 0.1 if known_s else 1.0
            self._round_trip_s[item.kind] = known_s + weight * (took_s - known_s)
        else:  # It is uncertain which copy was answered.
            self._round_trip_s[item.kind] = max(known_s, min(took_s, AGE_S_MAX) / PATIENCE)

    def _needs_s(self, item: _Item) -> float:
        """How long its bytes may take before they count as lost."""
        rate = self._bytes_per_s.get(item.peer)
        return item.nbytes * PATIENCE / rate if rate else item.nbytes / BYTES_PER_S_FIRST

    def _hurry(self, peer: str, now: float) -> None:
        """A peer answers again after an outage: resend other messages to it soon."""
        for item in self._of_peer.get(peer, {}).values():
            if item.copies > 1:
                item.backoff = 1
                soon = now + self.resend_s + self._needs_s(item)
                self._set_due(item, min(item.due, soon))

    def again(self, peer: str, until: float, now: float) -> None:
        """Messages sent to this peer until then are lost, or their answers are: they are due now,
        and their times so far are not measured.
        """
        for item in self._of_peer.get(peer, {}).values():
            if item.sent <= until:
                item.backoff, item.copies = 1, 0
                self._set_due(item, now)

    def put_off(self, key: Hashable, now: float) -> None:
        """The peer has the message and will answer when it can: resend it much later."""
        item = self._items.get(key)
        if item is not None:
            self._set_due(item, max(item.due, now + self.resend_s * PUT_OFF))

    def drop(self, key: Hashable) -> None:
        self._take(key)

    def message(self, key: Hashable) -> Message | None:
        item = self._items.get(key)
        return item.message if item else None

    def replace(self, key: Hashable, message: Message) -> None:
        """Resend this small message in the place of another one."""
        if (item := self._items.get(key)) is not None:
            item.message, item.nbytes = message, 0

    def sent_once(self, key: Hashable) -> float | None:
        """When a message was sent, if there is only one copy of it."""
        item = self._items.get(key)
        return item.sent if item is not None and item.copies == 1 else None

    def resend_now(self, key: Hashable, now: float, instead: Message | None = None) -> list[Send]:
        """Resend one message, or another one in its place, without waiting for its timeout."""
        item = self._items.get(key)
        if item is None:
            return []
        item.message = instead or item.message
        item.backoff = 1
        return [self._repeat(item, now)]

    def due(self, now: float) -> list[Send]:
        """The messages to resend by now, in the order of their first copies."""
        items = (self._items[key] for key in self._deadlines.by(now))
        return [self._repeat(item, now) for item in sorted(items, key=lambda item: item.place)]

    def deadline(self) -> float | None:
        return self._deadlines.first()

    def waiting(self) -> Iterator[tuple[Hashable, str, float]]:
        """(key, peer, since) of all unanswered messages that are not measured apart, nor held."""
        every = ((k, i) for k, i in self._items.items() if i.kind is Message and not i.is_held)
        return ((k, item.peer, item.first_sent) for k, item in every)

    def count(self, kind: str) -> int:
        """Number of unanswered messages with keys (kind, ...)."""
        return sum(isinstance(key, tuple) and key[0] == kind for key in self._items)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._items

    def _repeat(self, item: _Item, now: float) -> Send:
        self.repeated += 1
        self.on_repeat(item.key, item.nbytes, now)
        self._rearm(item, now)
        return Send(item.peer, item.message)

    def _rearm(self, item: _Item, now: float) -> None:
        least_s = self.resend_s * PUT_OFF if item.is_held else self.resend_s
        pause_s = max(least_s, PATIENCE * self._round_trip_s.get(item.kind, 0.0))
        longest_s = max(pause_s, AGE_S_MAX)
        item.sent_before = now if now > item.due + AWAY_S else item.sent
        item.sent = now
        wait_s = min(pause_s * item.backoff, longest_s) + self._needs_s(item) * item.backoff
        self._set_due(item, now + wait_s)
        item.backoff = min(2 * item.backoff, BACKOFF_MAX)
        item.copies += 1
