"""A replica's estimate of the run's progress, and the learning rate of its own steps there.

Progress is the number of samples of all replicas. The servers report with every read how many are
in their tables; without servers, the coordinator reports with every lease how many are done. Every
replica is assumed to have processed as many more as this one: since that report, plus those that
were unpushed then. So at a barrier of all replicas the estimate is exact, and it depends only on
the state of the run.
"""

from __future__ import annotations

from collections.abc import Callable


class Progress:
    def __init__(self, replicas: Callable[[], int]) -> None:
        """replicas: how many train, those about to begin included."""
        self.replicas = replicas
        self._reported = self._own = self._unpushed = 0
        self.samples = 0
        """The samples that all replicas have done so far; it never decreases."""

    def on_total(self, samples: int) -> None:
        """This number of samples is in the tables; a stale report has no effect."""
        if samples > self._reported:
            self._reported, self._own = samples, self._unpushed
            self._update()

    def computed(self, samples: int) -> None:
        """This replica has processed this number of further samples."""
        self._own += samples
        self._unpushed += samples
        self._update()

    def pushed(self) -> None:
        """Note that all samples of this replica are pushed."""
        self._unpushed = 0

    def _update(self) -> None:
        self.samples = max(self.samples, self._reported + self._own * max(1, self.replicas()))


class OwnRate:
    """The learning rate of a replica's own steps."""

    def __init__(self, lr: float) -> None:
        self.lr = lr
        """The peak of the schedule. A live setting."""
        self.factor: Callable[[int], float] | None = None
        """Samples of all replicas -> fraction of the peak."""

    def at(self, samples: int) -> float:
        return self.lr if self.factor is None else self.lr * self.factor(samples)
