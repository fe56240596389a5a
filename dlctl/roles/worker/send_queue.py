"""Where a worker's pushes and fetches wait for the byte rates, then for their answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from dlctl.machine import Send
from dlctl.messages import Json, Message
from dlctl.roles.protocol.retry import Retries
from dlctl.roles.worker.limiter import Limiter


@dataclass(frozen=True, slots=True)
class _Waiting:
    key: Hashable
    peer: str
    message: Message
    nbytes: int


class SendQueue:
    """A queue per direction: pushes are charged for what they send, fetches for what they bring."""

    def __init__(self, retries: Retries) -> None:
        self.retries = retries
        self.limiters = {"push": Limiter(), "fetch": Limiter()}
        self.push_window_bytes: float | None = None
        """So many bytes of pushes may be without an answer before another one is made."""
        retries.on_repeat = self._charge
        self._queues: dict[str, deque[_Waiting]] = {"push": deque(), "fetch": deque()}

    def queue(
        self, direction: str, key: Hashable, peer: str, message: Message, nbytes: int
    ) -> None:
        """Send `message` with the next `flush` that the limit allows, and then until it is
        answered.
        """
        self._queues[direction].append(_Waiting(key, peer, message, nbytes))

    def _charge(self, key: Hashable, nbytes: int, now: float) -> None:
        """What is sent again counts towards the limit as well."""
        direction = key[0] if isinstance(key, tuple) else ""
        if direction in self.limiters:
            self.limiters[direction].spend(nbytes, now)

    def correct(self, direction: str, nbytes: int, now: float) -> None:
        """What came was so many bytes more, or fewer, than had been charged for it."""
        if nbytes:
            self.limiters[direction].spend(nbytes, now)

    def flush(self, now: float) -> list[Send]:
        """Send what the limits allow by now."""
        sent = []
        for direction, queue in self._queues.items():
            limiter = self.limiters[direction]
            while queue and limiter.ready_at(now) <= now:
                waiting = queue.popleft()
                limiter.spend(waiting.nbytes, now)
                sent.append(
                    self.retries.add(
                        waiting.key, waiting.peer, waiting.message, now, waiting.nbytes
                    )
                )
        return sent

    def deadline(self) -> float | None:
        times = [self.limiters[d].free_at for d, queue in self._queues.items() if queue]
        return min(times, default=None)

    def waiting(self, now: float) -> Json:
        """{push_waiting_bytes, fetch_waiting_bytes}: what a limit holds back, and what
        was sent ahead of it."""
        found = {}
        for direction, limiter in self.limiters.items():
            if limiter.bytes_per_s is not None:
                queued = sum(waiting.nbytes for waiting in self._queues[direction])
                found[f"{direction}_waiting_bytes"] = queued + round(limiter.owed_bytes(now))
        return found

    def held_back(self) -> bool:
        """Whether a limit, and nobody else, is being waited for."""
        return any(self._queues.values())
