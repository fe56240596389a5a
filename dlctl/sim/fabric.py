"""Network cards in virtual time: what flows at the same time shares them fairly.

Each machine has one card, full duplex unless both directions share its rate. A flow is one
direction of a connection; its messages go one after the other. The rates of all flows are max-min
fair (Bertsekas and Gallager, Data Networks, section 6.5.2): they grow together, and a flow stops
growing when a card on its way is full. They change only when a flow begins or ends, so a large
message costs two events, not one per packet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from dlctl.sim.timeline import Timeline

SMALL_BYTES = 4096
"""A message of this size or less takes its time at the full rate of a card, and no share of it,
unless larger ones of its flow are before it."""
Sent = Callable[[], None]


@dataclass(slots=True, eq=False)
class _Flow:
    cards: tuple[tuple[str, str], tuple[str, str]]
    """(machine, direction) at its two ends."""
    queue: deque[tuple[int, Sent]] = field(default_factory=deque)
    """(bytes, what to call when the last one is sent) of each message, the first one is on its way.
    """
    left_bytes: float = 0.0
    rate: float = 0.0
    free_at: float = 0.0
    """When the last small message has been sent."""


class Fabric:
    """bytes_per_s: of every card, in each direction, but those of `rates`, by their machines.
    is_duplex: False: both directions of a card together have its rate.
    """

    def __init__(
        self,
        timeline: Timeline,
        bytes_per_s: float,
        rates: Mapping[str, float] | None = None,
        *,
        is_duplex: bool = True,
    ) -> None:
        self.timeline = timeline
        self.bytes_per_s = bytes_per_s
        self._rates = rates or {}
        self._ways = ("out", "in") if is_duplex else ("both", "both")
        self.busy_bytes: dict[tuple[str, str], float] = {}
        """(machine, "out" or "in", or "both") -> bytes through its card so far."""
        self._flows: dict[Hashable, _Flow] = {}
        self._active: list[_Flow] = []
        self._at = 0.0
        self._version = 0

    def send(self, flow: Hashable, source: str, target: str, nbytes: int, sent: Sent) -> None:
        """Call `sent` when the last byte has left. flow: messages of one flow keep their order."""
        out, come = self._ways
        cards = (source, out), (target, come)
        for card in cards:
            self.busy_bytes[card] = self.busy_bytes.get(card, 0.0) + nbytes
        found = self._flows.setdefault(flow, _Flow(cards))
        if nbytes <= SMALL_BYTES and not found.queue:
            found.free_at = max(self.timeline.now, found.free_at) + nbytes / min(
                map(self._rate, cards)
            )
            self.timeline.at(found.free_at, sent)
            return
        found.queue.append((nbytes, sent))
        if len(found.queue) == 1:
            found.left_bytes = float(nbytes)
            self._advance()
            self._active.append(found)
            self._share()

    def _rate(self, card: tuple[str, str]) -> float:
        return self._rates.get(card[0], self.bytes_per_s)

    def _advance(self) -> None:
        """What was sent since the rates were last changed."""
        passed_s, self._at = self.timeline.now - self._at, self.timeline.now
        for flow in self._active:
            flow.left_bytes -= flow.rate * passed_s

    def _share(self) -> None:
        """New rates, and the event at which the next message has been sent."""
        room: dict[tuple[str, str], float] = {}
        users: dict[tuple[str, str], list[_Flow]] = {}
        for flow in self._active:
            for card in flow.cards:
                room[card] = self._rate(card)
                users.setdefault(card, []).append(flow)
        waiting = {id(flow) for flow in self._active}
        while waiting:
            share, full = min(
                (room[card] / len(mine), card)
                for card, flows in users.items()
                if (mine := [flow for flow in flows if id(flow) in waiting])
            )
            for flow in users[full]:
                if id(flow) in waiting:
                    waiting.discard(id(flow))
                    flow.rate = share
                    for card in flow.cards:
                        room[card] -= share
        self._version += 1
        if self._active:
            soonest_s = min(max(0.0, flow.left_bytes) / flow.rate for flow in self._active)
            version = self._version
            self.timeline.after(soonest_s, lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:
            return  # The rates have changed since.
        self._advance()
        least = min(flow.left_bytes for flow in self._active)
        done = [flow for flow in self._active if flow.left_bytes <= max(least, 0.5)]
        for flow in done:
            _, sent = flow.queue.popleft()
            self.timeline.after(0.0, sent)
            if flow.queue:
                flow.left_bytes = float(flow.queue[0][0])
            else:
                self._active.remove(flow)
        self._share()


class CardQueues:
    """The same cards for very many flows: each sends, and receives, one message after the other, in
    the order in which they were sent. Together they are as fast as if they were fair, and it takes
    one event for each message however many flows there are. Small messages wait for none but those
    of their flow: a heartbeat is not late because a server has a model to send to everybody.
    """

    def __init__(self, timeline: Timeline, bytes_per_s: float) -> None:
        self.timeline = timeline
        self.bytes_per_s = bytes_per_s
        self._cards: dict[tuple[str, str], _QueueingCard] = {}
        self._sent_at: dict[Hashable, float] = {}
        """Flow -> when the last one of its messages has been sent."""

    def send(self, flow: Hashable, source: str, target: str, nbytes: int, sent: Sent) -> None:
        """As `Fabric.send`."""
        now, takes_s = self.timeline.now, nbytes / self.bytes_per_s
        ends = self._card(source, "out"), self._card(target, "in")
        at = now
        for card in ends:
            if nbytes <= SMALL_BYTES:
                card.done_s += takes_s
            else:
                # The first bytes arrive while the last ones are still to be sent.
                at = card.put(now, at, takes_s)
        at = self._sent_at[flow] = max(at, now + takes_s, self._sent_at.get(flow, 0.0))
        self.timeline.at(at, sent)

    def _card(self, machine: str, way: str) -> _QueueingCard:
        card = self._cards.get((machine, way))
        if card is None:
            card = self._cards[machine, way] = _QueueingCard()
        return card

    def busy_s(self) -> dict[tuple[str, str], float]:
        """(machine, "out" or "in") -> how long its card has been busy so far. What still waits is
        not in it: on a slow link that may be as much as it carries in minutes.
        """
        return {key: card.busy_s(self.timeline.now) for key, card in self._cards.items()}


class _QueueingCard:
    """One direction of a card, and when it is busy with what it was given."""

    def __init__(self) -> None:
        self.done_s = 0.0
        """How long it was busy with what is over."""
        self._free_at = 0.0
        self._planned: deque[tuple[float, float]] = deque()
        """(when it ends, seconds) of the messages that are not known to be over."""

    def put(self, now: float, at: float, takes_s: float) -> float:
        """When a message has passed that the card before has passed on at that time."""
        self._free_at = end = max(at, self._free_at + takes_s, now + takes_s)
        self._planned.append((end, takes_s))
        self._end_those_until(now)
        return end

    def _end_those_until(self, now: float) -> None:
        while self._planned and self._planned[0][0] <= now:
            self.done_s += self._planned.popleft()[1]

    def busy_s(self, now: float) -> float:
        self._end_those_until(now)
        begun = (max(0.0, takes_s - (end - now)) for end, takes_s in self._planned)
        return self.done_s + sum(begun)
