"""How far the run is, as one replica knows it, and the rate of its own steps there.

What counts is the samples of all replicas. The servers tell how many are in their tables with every
read; where there are none, the coordinator tells with every lease how many are done. Since then
every member is taken to have had as many as this one. So with a barrier, where all have the same
number, it is exact, and it depends on nothing but the state of the run.
"""

from __future__ import annotations

from collections.abc import Callable


class Progress:
    def __init__(self, replicas: Callable[[], int]) -> None:
        """replicas: how many train."""
        self._replicas = replicas
        self._told = self._own = 0

    def told(self, samples: int) -> None:
        """So many samples are done; an older word changes nothing."""
        if samples > self._told:
            self._told, self._own = samples, 0

    def computed(self, samples: int) -> None:
        """This replica has had so many more."""
        self._own += samples

    @property
    def samples(self) -> int:
        return self._told + self._own * max(1, self._replicas())


class OwnRate:
    """The rate of a replica's own steps."""

    def __init__(self, lr: float) -> None:
        self.lr = lr
        """The peak of its schedule. It changes live."""
        self.factor: Callable[[int], float] | None = None
        """Samples that all have had -> the part of the peak."""

    def at(self, samples: int) -> float:
        return self.lr if self.factor is None else self.lr * self.factor(samples)
