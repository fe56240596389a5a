"""The samples that are leased to a training loop of the user's own, and how its loader cuts them.

They are one line, in the order of the leases: delivered to the loop up to a mark, taken by the
loader up to a later one. What is taken and not delivered can be taken again.
"""

from __future__ import annotations

from collections import deque

from dlctl.roles.protocol.loop_effects import GiveData, PortionPart


class Stock:
    def __init__(self, *, cuts: bool = False) -> None:
        """cuts: a batch ends where its portion does, as each portion is a client."""
        self.cuts = cuts
        self._portions: deque[PortionPart] = deque()
        """Whole ones, which are not delivered completely."""
        self._samples = self._delivered = self._taken = 0
        """Of these portions: all, those that are delivered (of the first one), and those that are
        taken but not delivered."""
        self._has_asked = False
        self.none_now = False
        """There is no data for now, so what is begun must not wait for more."""
        self.ends = False
        """The replica leaves: only a portion that is partly delivered is finished."""

    def give(self, effect: GiveData) -> None:
        if effect.lease is None:
            self.none_now = True
            self.ends |= effect.ends
            return
        lease = effect.lease
        self._portions.append(PortionPart(lease.data_epoch, lease.portion, lease.start, lease.stop))
        self._samples += lease.stop - lease.start
        self.none_now = self._has_asked = False

    def undelivered(self) -> int:
        """Samples that the loop will still get of what is leased."""
        if not self.ends:
            return self._samples - self._delivered
        return _size(self._portions[0]) - self._delivered if self._delivered else 0

    def untaken(self) -> int:
        """Those of them that can be taken."""
        return max(0, self.undelivered() - self._taken)

    def is_within_portion(self) -> bool:
        """Whether the loop has a part of a portion, and will get the rest."""
        return self._delivered > 0

    def has_batch(self, samples: int) -> bool:
        """Whether there is a batch of so many, or a smaller one that must not wait for more."""
        if self.untaken() >= (1 if self.cuts else samples):
            return True
        return (self.none_now or self.ends) and self.undelivered() > 0

    def asks_below(self, samples: int) -> bool:
        """Whether to ask for data, as fewer can be taken. True once, until data comes."""
        if self._has_asked or self.ends or self.untaken() >= samples:
            return False
        self._has_asked = True
        return True

    def take(self, samples: int) -> tuple[PortionPart, ...]:
        """So many, or all that there are."""
        samples = min(samples, self.untaken())
        before = self._delivered + self._taken
        taken: list[PortionPart] = []
        for portion in self._portions:
            if not samples:
                break
            start = portion.start + before
            before -= _size(portion)
            if before < 0:
                taken.append(portion._replace(start=start, stop=min(start + samples, portion.stop)))
                samples -= _size(taken[-1])
                before = 0
                if self.cuts:
                    break
        self._taken += samples_of(tuple(taken))
        return tuple(taken)

    def deliver(self, pieces: tuple[PortionPart, ...]) -> None:
        """The loop has what was taken first."""
        samples = samples_of(pieces)
        self._taken -= samples
        self._delivered += samples
        while self._portions and self._delivered >= (size := _size(self._portions[0])):
            self._portions.popleft()
            self._delivered -= size
            self._samples -= size

    def take_back(self) -> None:
        """What is taken and not delivered is lost on its way: it is taken again, first."""
        self._taken = 0


def samples_of(pieces: tuple[PortionPart, ...]) -> int:
    return sum(_size(piece) for piece in pieces)


def _size(piece: PortionPart) -> int:
    return piece.stop - piece.start
