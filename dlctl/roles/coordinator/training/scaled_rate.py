"""The rate, if it scales with the number of workers: its factor, and since when that applies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dlctl.job import schedule
from dlctl.records.memory import Entry, Memory
from dlctl.roles.coordinator.records import Owner
from dlctl.roles.coordinator.run_state import RunState
from dlctl.roles.coordinator.training.run_progress import RunProgress
from dlctl.roles.coordinator.training.supply import DataSupply
from dlctl.wire.messages import Json


class ScaledRate(Owner):
    PERSISTED = frozenset({"scale"})

    def __init__(self, run: RunState, data: DataSupply, progress: RunProgress) -> None:
        self.run = run
        self.data = data
        self.progress = progress
        job = run.job
        self.scale = schedule.first_scale(job) if schedule.scales(job.schedule) else None
        """The current scale of the learning rate; None: it does not depend on the workers."""

    def rescale(self, workers: int) -> None:
        """The number of workers changes. The scaled rate applies from the first sample that has not
        been leased yet: all servers receive it before that sample.
        """
        after = schedule.multiple(self.run.job, workers)
        if self.scale is not None and self.scale.after != after:
            warmup = schedule.warmup_samples(self.run.job, self.data.dataset.samples)
            since = max(self.data.pool.samples_leased(), self.progress.samples)
            self.scale = self.scale.to(after, since, warmup)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the factors from a checkpoint's manifest."""
        if self.scale is not None and saved.get("scale"):
            self.scale = schedule.Scale(*saved["scale"])

    def to_json(self) -> Json:
        """The factors of the learning rate, for a checkpoint's manifest."""
        return {"scale": self.scale} if self.scale is not None else {}

    def memory(self) -> Iterator[Entry]:
        yield Entry("scale", self.scale)

    def recall(self, memory: Memory, now: float) -> None:
        self.restore(memory.stored)
