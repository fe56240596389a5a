"""How long the pushes of a worker take to arrive, for `[servers] layout`.

From the sending of a push to its first ack, which a server sends when the push is in its memory or,
if the job wants that, on its disk. A push that was sent twice is not measured, as it is unknown
which copy was acknowledged.
"""

from __future__ import annotations

from dlctl.roles.protocol.limits import FLIGHTS_MAX
from dlctl.util.names import FLIGHTS
from dlctl.wire.messages import Json

BYTES_MIN = 16 * 1024
"""Of a smaller push the time is that of its way, and not of its bytes."""


class Flights:
    def __init__(self) -> None:
        self._number = 0
        """Of the write whose pushes arrive now."""
        self._sent_at = -1.0
        self._arriving: dict[str, tuple[int, float]] = {}
        self._newest: dict[str, tuple[int, float]] = {}
        """The flights of the write before: all of its pushes that were measured."""

    def arrived(self, peer: str, nbytes: int, sent_at: float, now: float) -> None:
        """The first ack of a push. Pushes of one write are sent at the same time."""
        if sent_at != self._sent_at:
            self._newest, self._arriving = self._arriving, {}
            self._number, self._sent_at = self._number + 1, sent_at
        if now > sent_at and len(self._arriving) < FLIGHTS_MAX:
            self._arriving[peer] = nbytes, now - sent_at

    def report(self) -> Json:
        """{flights: [number of the newest write, {peer: [bytes, seconds]}]}; {} before it."""
        if not self._newest:
            return {}
        of = {
            peer: [nbytes, round(s, 6)] for peer, (nbytes, s) in self._newest.items() if s >= 1e-6
        }
        return {FLIGHTS: [self._number - 1, of]}
