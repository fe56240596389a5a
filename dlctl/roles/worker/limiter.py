"""A rate limit in bytes per second that may change at any time."""

from __future__ import annotations


class Limiter:
    """A token bucket that goes into debt: a message of any size may start once the balance is not
    negative, and its bytes are paid back at the rate. The average is exact whatever the sizes, and
    at most one message is ahead of it. After a pause there is no saved-up burst.
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_at = 0.0
        """When the debt is paid."""
        self.spent_bytes = 0
        """In all, with a limit and without."""

    def change(self, bytes_per_s: float | None, now: float) -> None:
        """A new rate. Debts are paid at the new one, so that a raised limit helps at once."""
        owed = self.owed_bytes(now)
        self.bytes_per_s = bytes_per_s
        self.free_at = now + owed / bytes_per_s if bytes_per_s else now

    def owed_bytes(self, now: float) -> float:
        """Of what was sent, what is not paid back yet."""
        return max(0.0, self.free_at - now) * (self.bytes_per_s or 0.0)

    def ready_at(self, now: float) -> float:
        """When the next message may start: `now` or later."""
        return now if self.bytes_per_s is None else max(now, self.free_at)

    def spend(self, nbytes: int, now: float) -> None:
        self.spent_bytes += nbytes
        if self.bytes_per_s is not None:
            self.free_at = max(now, self.free_at) + nbytes / self.bytes_per_s
