"""Queues of a worker's pushes and fetches: they wait for the byte rates, then for answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any, NamedTuple

from dlctl.roles.protocol.retry import Retries
from dlctl.wire.machine import Send
from dlctl.wire.messages import Json, Message


class Limiter:
    """A token bucket that allows debt: a message of any size may start once the balance is not
    negative, and its bytes are paid back at the rate. The average is exact for any sizes, and at
    most one message is ahead of it. A pause does not accumulate credit for a burst.
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.bytes_per_s = bytes_per_s
        """A live setting, effective at once: the debt is paid at the new rate. Before it changes,
        spend nothing: what was paid until then was paid at the old one."""
        self.spent_bytes = 0
        """Bytes sent in total, with a limit and without."""
        self._debt_bytes = self._since = 0.0
        """After the newest message, and when that was sent."""

    @property
    def free_at(self) -> float:
        """When the bytes sent beyond the limit are paid back."""
        return self._since + (self._debt_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)

    def owed_bytes(self, now: float) -> float:
        """Sent bytes that are not paid back yet."""
        return max(0.0, self.free_at - now) * (self.bytes_per_s or 0.0)

    def spend(self, nbytes: int, now: float) -> None:
        self.spent_bytes += nbytes
        self._debt_bytes, self._since = self.owed_bytes(now) + nbytes, now


class _Queued(NamedTuple):
    key: Hashable
    peer: str
    message: Message
    nbytes: int
    is_held: bool


class SendQueue:
    """A queue per direction: pushes are charged for their bytes, fetches for their answers'."""

    def __init__(self, retries: Retries) -> None:
        self.retries = retries
        self.limiters = {"push": Limiter(), "fetch": Limiter()}
        self.push_window_bytes: float | None = None
        """No new push is made while this number of bytes of pushes is unacknowledged."""
        retries.on_repeat = self._charge
        self._queues = {direction: deque[_Queued]() for direction in self.limiters}

    def queue(
        self, key: tuple[Any, ...], peer: str, message: Message, nbytes: int,
        *, is_held: bool = False,
    ) -> None:  # fmt: skip
        """Send `message` with the next `flush` that the limit allows, and resend it until it is
        answered. key: begins with the direction. is_held: see `Retries.add`.
        """
        self._queues[key[0]].append(_Queued(key, peer, message, nbytes, is_held))

    def message(self, key: Hashable) -> Message | None:
        """The queued message with this key."""
        queued = (item for queue in self._queues.values() for item in queue)
        return next((item.message for item in queued if item.key == key), None)

    def replace(self, key: Hashable, message: Message) -> None:
        """Send this small message in the place of another one, from now on."""
        self.retries.replace(key, message)
        for queue in self._queues.values():
            for place, item in enumerate(queue):
                if item.key == key:
                    queue[place] = item._replace(message=message, nbytes=0)

    def drop(self, key: Hashable) -> None:
        """Neither send nor resend this message any more."""
        self.retries.drop(key)
        for direction, queue in self._queues.items():
            self._queues[direction] = deque(item for item in queue if item.key != key)

    def _charge(self, key: Hashable, nbytes: int, now: float) -> None:
        """Resent messages count towards the limit as well."""
        direction = key[0] if isinstance(key, tuple) else ""
        if direction in self.limiters:
            self.limiters[direction].spend(nbytes, now)

    def flush(self, now: float) -> list[Send]:
        """Send what the limits allow by now."""
        sent = []
        for direction, queue in self._queues.items():
            limiter = self.limiters[direction]
            while queue and limiter.free_at <= now:
                key, peer, message, nbytes, is_held = queue.popleft()
                limiter.spend(nbytes, now)
                sent.append(self.retries.add(key, peer, message, now, nbytes, is_held=is_held))
        return sent

    def deadline(self) -> float | None:
        times = [self.limiters[d].free_at for d, queue in self._queues.items() if queue]
        return min(times, default=None)

    def waiting(self, now: float) -> Json:
        """{push_waiting_bytes, fetch_waiting_bytes}: bytes that a limit holds back, and the debt of
        those already sent."""
        found = {}
        for direction, limiter in self.limiters.items():
            if limiter.bytes_per_s is not None:
                queued = sum(item.nbytes for item in self._queues[direction])
                found[f"{direction}_waiting_bytes"] = queued + round(limiter.owed_bytes(now))
        return found
