"""Messages that wait for an answer, sent again until it comes. The one retry mechanism of all
roles.

The transport delivers at most once and may lose what was under way when a connection broke. So
every message that matters is kept here under a key until its answer arrives. The timeout follows
the measured round trip of small messages (four times its average, never under `resend_s`) plus the
time that the bytes need (four times as long as they took lately to that peer; 1 MB/s as long as
nothing is known of it), and doubles with every repetition up to four times, but for its first part
not beyond the age at which a message counts as lost. On a slow link a copy too many makes all that
is behind it late; so a link may be found to be as slow as it is. The first answer after an outage
tells that the peer can be reached again: what else waits for it is sent again soon. What was on its
way over a connection that has ended is sent again over the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from dlctl.machine import Send
from dlctl.messages import Message

BACKOFF_MAX = 4
PUT_OFF = 8
"""Times `resend_s`: for what the peer has, and cannot answer yet."""
AGE_S_MAX = 8.0
"""A message that was answered later than this was lost, not slow."""
BYTES_PER_S_FIRST = 1e6
"""What a link is taken to carry until it was measured."""
MEASURED_BYTES_MIN = 64 * 1024
"""Messages from this on say something about the link and not only about its latency."""
PATIENCE = 4
"""Times the time that is to be expected."""
AWAY_S = 3.0
"""What should have been sent again so long ago was not, because we ourselves stood still (SIGSTOP):
how long its answer took, as we see it, says nothing of the peer."""


@dataclass(slots=True)
class _Item:
    key: Hashable
    peer: str
    message: Message
    nbytes: int
    first_sent: float
    sent: float
    sent_before: float
    """The time of the copy before the newest one; if we stood still in between, of the newest."""
    due: float = 0.0
    copies: int = 0
    backoff: int = 1


class Retries:
    def __init__(self, resend_s: float) -> None:
        self.resend_s = resend_s
        self.repeated = 0
        """Messages sent again so far."""
        self._items: dict[Hashable, _Item] = {}
        self._round_trip_s = 0.0
        self._bytes_per_s: dict[str, float] = {}
        """Peer -> what was measured last; it falls at once, and at most doubles."""
        self.on_repeat: Callable[[Hashable, int, float], None] = lambda key, nbytes, now: None
        """Called with (key, bytes, now) for every message that is sent again."""

    def add(self, key: Hashable, peer: str, message: Message, now: float, nbytes: int = 0) -> Send:
        """Send `message` now and again until `done(key)`."""
        item = _Item(key, peer, message, nbytes, now, now, now, due=now)
        self._items[key] = item
        self._rearm(item, now)
        return Send(peer, message)

    def done(self, key: Hashable, now: float, nbytes: int | None = None) -> float | None:
        """The answer has come: seconds since the first sending; None if nothing waited.

        nbytes: that there were, if it may be another number than was expected.
        """
        item = self._items.pop(key, None)
        if item is None:
            return None
        item.nbytes = item.nbytes if nbytes is None else nbytes
        # Nobody knows which copy was answered, but hardly one older than the last two. Without this
        # a slow link would repeat everything, and never learn that it is slow.
        took_s = now - (item.sent if item.copies == 1 else item.sent_before)
        if now <= item.due + AWAY_S:
            self._measure(item, took_s)
        if item.copies > 1:
            self._hurry(item.peer, now)
        return now - item.first_sent

    def _measure(self, item: _Item, took_s: float) -> None:
        if item.nbytes >= MEASURED_BYTES_MIN:
            self._measure_link(item.peer, item.nbytes, took_s)
        else:
            self._measure_round_trip(took_s, is_sure=item.copies == 1)

    def _measure_round_trip(self, took_s: float, *, is_sure: bool) -> None:
        if is_sure:
            weight = 0.1 if self._round_trip_s else 1.0
            self._round_trip_s += weight * (took_s - self._round_trip_s)
        else:
            self._round_trip_s = max(self._round_trip_s, min(took_s, AGE_S_MAX) / PATIENCE)

    def _measure_link(self, peer: str, nbytes: int, took_s: float) -> None:
        measured = nbytes / max(took_s, 1e-6)
        before = self._bytes_per_s.get(peer, PATIENCE * BYTES_PER_S_FIRST)
        self._bytes_per_s[peer] = min(measured, 2 * before)

    def _needs_s(self, item: _Item) -> float:
        """How long its bytes may take before they are taken for lost."""
        rate = self._bytes_per_s.get(item.peer)
        return item.nbytes * PATIENCE / rate if rate else item.nbytes / BYTES_PER_S_FIRST

    def _hurry(self, peer: str, now: float) -> None:
        """A peer that had been away answers: what else it has not got is sent again soon."""
        for item in self._items.values():
            if item.peer == peer and item.copies > 1:
                item.backoff = 1
                item.due = min(item.due, now + self.resend_s + self._needs_s(item))

    def again(self, peer: str, until: float, now: float) -> None:
        """What was sent to this peer until then has gone, or its answer has: it is due now, and how
        long that took does not count.
        """
        for item in self._items.values():
            if item.peer == peer and item.sent <= until:
                item.backoff, item.due, item.copies = 1, now, 0

    def put_off(self, key: Hashable, now: float) -> None:
        """The peer has the message and will answer when it can: only repeat it much later."""
        item = self._items.get(key)
        if item is not None:
            item.due = max(item.due, now + self.resend_s * PUT_OFF)

    def drop(self, key: Hashable) -> None:
        self._items.pop(key, None)

    def update(self, key: Hashable, message: Message) -> None:
        """What is sent from now on under `key`, if it still waits."""
        if key in self._items:
            self._items[key].message = message

    def message(self, key: Hashable) -> Message | None:
        item = self._items.get(key)
        return item.message if item else None

    def resend_now(self, key: Hashable, now: float) -> list[Send]:
        """Repeat one message without waiting for its timeout."""
        item = self._items.get(key)
        if item is None:
            return []
        item.backoff = 1
        return [self._repeat(item, now)]

    def due(self, now: float) -> list[Send]:
        """What has to be sent again by now, in the order in which it was first sent."""
        return [self._repeat(item, now) for item in self._items.values() if item.due <= now]

    def deadline(self) -> float | None:
        return min((item.due for item in self._items.values()), default=None)

    def waiting(self) -> Iterator[tuple[Hashable, str, float]]:
        """(key, peer, since) of everything that has no answer yet."""
        return ((key, item.peer, item.first_sent) for key, item in self._items.items())

    def count(self, kind: str) -> int:
        """How many have no answer yet of those whose keys are (kind, ...)."""
        return sum(isinstance(key, tuple) and key[0] == kind for key in self._items)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)

    def _repeat(self, item: _Item, now: float) -> Send:
        self.repeated += 1
        self.on_repeat(item.key, item.nbytes, now)
        self._rearm(item, now)
        return Send(item.peer, item.message)

    def _rearm(self, item: _Item, now: float) -> None:
        pause_s = max(self.resend_s, PATIENCE * self._round_trip_s)
        longest_s = max(pause_s, AGE_S_MAX)
        item.sent_before = now if now > item.due + AWAY_S else item.sent
        item.sent = now
        item.due = now + min(pause_s * item.backoff, longest_s) + self._needs_s(item) * item.backoff
        item.backoff = min(2 * item.backoff, BACKOFF_MAX)
        item.copies += 1
