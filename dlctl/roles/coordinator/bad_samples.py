"""Samples that no worker could load: how many of an epoch a run goes on without.

A portion that is leased again has the same ones, so each counts once in an epoch.
"""

from __future__ import annotations

from dlctl import messages as m
from dlctl.roles.coordinator.records import History

EPOCHS_KEPT = 2
"""Around the end of a data epoch portions of two epochs are in work."""


class BadSamples:
    def __init__(self, context: History, limit: int) -> None:
        """limit: samples of one data epoch."""
        self.context = context
        self.limit = limit
        self._found: dict[int, set[int]] = {}
        """Data epoch -> samples."""

    def failed(self, worker: str, message: m.SampleFailed) -> str:
        """A worker has gone on without a sample. Returns why the run cannot; "" if it can."""
        data_epoch = message.data_epoch
        found = self._found.setdefault(data_epoch, set())
        for epoch in sorted(self._found)[:-EPOCHS_KEPT]:
            del self._found[epoch]
        if message.sample in found:
            return ""
        found.add(message.sample)
        count = f"{len(found)} of at most {self.limit} in epoch {data_epoch}"
        text = f"sample {message.sample} could not be loaded ({count}): {message.error}"
        self.context.event("sample", worker, text, detail=message.detail)
        if len(found) != self.limit + 1:
            return ""
        which = f"{len(found)} samples of epoch {data_epoch} could not be loaded"
        return f"{message.error}; {which}, and data.bad_samples_max is {self.limit}"
