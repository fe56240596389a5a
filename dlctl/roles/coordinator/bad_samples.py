"""The samples that workers could not load: a run continues without some of them in a data epoch.

A worker is believed about the portions that it has. The worker that reports one sample too many has
failed: what it has reported is forgotten, and another worker loads its portions. If the samples are
bad, that worker reports one too many as well, and the run ends.
"""

from __future__ import annotations

from collections import Counter

from dlctl import messages as m
from dlctl.errors import RemoteProtocolError

EPOCHS_KEPT = 2
"""Around the end of a data epoch, portions of two epochs are leased."""


class BadSamples:
    def __init__(self, most: int) -> None:
        """most: samples of an epoch without which the run continues."""
        self.most = most
        self._found: dict[int, dict[int, tuple[int, int]]] = {}
        """Data epoch -> sample -> the slot that has reported it first, and its portion."""
        self._counts: Counter[tuple[int, int, int]] = Counter()
        """(data epoch, slot, portion) -> how many of `_found` it has."""

    def add(self, said: m.SampleFailed, portion_samples: int) -> int:
        """Count a sample once in an epoch: a portion that is leased again has the same ones.
        Returns how many the epoch has with it; 0 if it was known.

        Raises RemoteProtocolError if the worker reports more than its portion has.
        """
        found = self._found.setdefault(said.data_epoch, {})
        for old in sorted(self._found)[:-EPOCHS_KEPT]:
            del self._found[old]
            self._count()
        if said.sample in found:
            return 0
        by = said.data_epoch, said.slot, said.portion
        if self._counts[by] >= portion_samples:
            raise RemoteProtocolError(f"its portion has {portion_samples} samples")
        found[said.sample] = by[1:]
        self._counts[by] += 1
        return len(found)

    def forget(self, slot: int) -> None:
        """Do not count what this slot has reported."""
        for epoch, found in self._found.items():
            self._found[epoch] = {n: of for n, of in found.items() if of[0] != slot}
        self._count()

    def _count(self) -> None:
        rows = ((epoch, *of) for epoch, found in self._found.items() for of in found.values())
        self._counts = Counter(rows)
