"""How far the run is, as one replica knows it, and the rate of its own steps there.

What counts is the samples of all replicas. The servers tell how many are in their tables with every
read; where there are none, the coordinator tells with every lease how many are done. Every replica
is taken to have had as many more as this one: since the word, and what it had not pushed then. So
where all meet at a barrier it is exact, and it depends on nothing but the state of the run.
"""

from __future__ import annotations

from collections.abc import Callable


class Progress:
    def __init__(self, replicas: Callable[[], int]) -> None:
        """replicas: how many train."""
        self._replicas = replicas
        self._told = self._own = self._unpushed = 0
        self.samples = 0
        """Of all replicas so far; it never goes back."""

    def told(self, samples: int) -> None:
        """So many samples are in the tables; an older word changes nothing."""
        if samples > self._told:
            self._told, self._own = samples, self._unpushed
            self._look()

    def computed(self, samples: int) -> None:
        """This replica has had so many more."""
        self._own += samples
        self._unpushed += samples
        self._look()

    def pushed(self) -> None:
        """All that it has had is on its way into the tables."""
        self._unpushed = 0

    def _look(self) -> None:
        self.samples = max(self.samples, self._told + self._own * max(1, self._replicas()))


class OwnRate:
    """The rate of a replica's own steps."""

    def __init__(self, lr: float) -> None:
        self.lr = lr
        """The peak of its schedule. It changes live."""
        self.factor: Callable[[int], float] | None = None
        """Samples that all have had -> the part of the peak."""

    def at(self, samples: int) -> float:
        return self.lr if self.factor is None else self.lr * self.factor(samples)
