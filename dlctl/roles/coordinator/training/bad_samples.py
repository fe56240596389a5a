"""The samples that workers could not load: a run continues without some of them in a data epoch.

A report counts if its worker has the portion. The worker that reports one sample too many has
failed: what it has reported is forgotten, and another worker loads its portions. If the samples are
bad, that worker reports one too many as well, and the run ends.
"""

from __future__ import annotations

from collections import Counter

from dlctl.errors import RemoteProtocolError
from dlctl.roles.coordinator.records import EventContext
from dlctl.roles.coordinator.training.supply import DataSupply
from dlctl.wire import messages as m

EPOCHS_KEPT = 2
"""Around the end of a data epoch, portions of two epochs are leased."""


class BadSamples:
    def __init__(self, context: EventContext, data: DataSupply, most: int) -> None:
        """most: samples of an epoch without which the run continues."""
        self.context = context
        self.data = data
        self.most = most
        self._found: dict[int, dict[int, tuple[int, int]]] = {}
        """Data epoch -> sample -> the slot that has reported it first, and its portion."""
        self._counts: Counter[tuple[int, int, int]] = Counter()
        """(data epoch, slot, portion) -> how many of `_found` it has."""

    def on_failed(self, failed: m.SampleFailed) -> str:
        """A worker has skipped a sample. Returns the worker's error if that is one too many.

        Raises RemoteProtocolError if the sample cannot be in a portion that the worker has.
        """
        data, epoch = self.data, failed.data_epoch
        if not data.is_open or not data.pool.may_finish(failed.slot, epoch, failed.portion):
            raise RemoteProtocolError(f"it does not have portion {failed.portion} of epoch {epoch}")
        rows = data.rows()
        if not failed.sample < rows:
            raise RemoteProtocolError(f"the dataset has {rows} samples")
        start, stop = data.pool.bounds(failed.portion)
        count = self._add(failed, stop - start)
        if not count:
            return ""
        of = f"{count} of at most {self.most} in epoch {epoch}"
        text = f"sample {failed.sample} could not be loaded ({of}): {failed.error}"
        self.context.event("sample", f"worker-{failed.slot}", text, detail=failed.detail)
        if count <= self.most:
            return ""
        self._forget(failed.slot)
        which = f"{count} samples of epoch {epoch} could not be loaded"
        return f"{failed.error}; {which}, and data.bad_samples_max is {self.most}"

    def _add(self, failed: m.SampleFailed, portion_samples: int) -> int:
        """Count a sample once in an epoch: a portion that is leased again has the same ones.
        Returns how many the epoch has with it; 0 if it was known.

        Raises RemoteProtocolError if the worker reports more than its portion has.
        """
        found = self._found.setdefault(failed.data_epoch, {})
        for old in sorted(self._found)[:-EPOCHS_KEPT]:
            del self._found[old]
            self._count()
        if failed.sample in found:
            return 0
        by = failed.data_epoch, failed.slot, failed.portion
        if self._counts[by] >= portion_samples:
            raise RemoteProtocolError(f"its portion has {portion_samples} samples")
        found[failed.sample] = by[1:]
        self._counts[by] += 1
        return len(found)

    def _forget(self, slot: int) -> None:
        """Do not count what this slot has reported."""
        for epoch, found in self._found.items():
            self._found[epoch] = {n: of for n, of in found.items() if of[0] != slot}
        self._count()

    def _count(self) -> None:
        rows = ((epoch, *of) for epoch, found in self._found.items() for of in found.values())
        self._counts = Counter(rows)
