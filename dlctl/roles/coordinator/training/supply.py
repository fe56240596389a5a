"""The run's dataset, as its workers have built it, and the portions that it is leased in."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dlctl.errors import DlctlError
from dlctl.job import batches
from dlctl.records.memory import PORTION, Entry, Fields, Memory, Work
from dlctl.roles.coordinator.pools.data_pool import DataPool
from dlctl.roles.coordinator.records import Owner
from dlctl.roles.coordinator.run_state import RunState
from dlctl.roles.coordinator.training import data_pools
from dlctl.roles.coordinator.training.dataset import Dataset
from dlctl.roles.coordinator.training.lead import MethodLead
from dlctl.util.text import plural
from dlctl.wire.messages import Json


class DataSupply(Owner):
    PERSISTED = frozenset(
        {"dataset", "batch_size", "_lists_unknown", "_order", "_next", "_is_released"}
    )

    def __init__(self, run: RunState, lead: MethodLead) -> None:
        self.run = run
        self.lead = lead
        self.batch_size = 0
        """The batch size that was found; 0: the job file sets it, or none was found yet."""
        self.dataset = Dataset()
        """The dataset of `pool`."""
        self._pool: DataPool | None = None
        self._built = Dataset()
        """The dataset before there is a pool; until a worker has reported, that of the checkpoint.
        """
        self._lists_unknown = False
        """A predecessor of an earlier version has recorded the dataset without what identifies its
        parts: the first worker says it."""
        self._order: str | None = None
        """Digest of the task's sample order, from the first worker that reported."""
        self._saved: Json = {}
        """The data pool's state in the checkpoint that the run resumes from."""
        self._next = (0, 0)
        """The next portion of the pool, and whether the workers were released, as persisted."""
        self._is_released = False

    @property
    def is_open(self) -> bool:
        """Whether the dataset is known, and cut into portions."""
        return self._pool is not None

    @property
    def pool(self) -> DataPool:
        """The portions of all epochs; for a method that the coordinator drives, a batch is an
        epoch.
        """
        assert self._pool is not None
        return self._pool

    def rows(self) -> float:
        """Samples of the dataset by number; infinite if they are unknown: a task with an order of
        its own may choose some of them for each epoch.
        """
        if self.dataset.clients or self.dataset.shards:
            return sum(self.dataset.clients)
        return self.dataset.samples if self._order == "" else math.inf

    # ------------------------------------------------------------ what workers have built

    def find_batch_size(self, found: int) -> bool:
        """A worker, or an earlier execution, has found it. Returns whether it was unknown."""
        before, self.run.job = self.run.job, batches.resolved(self.run.job, found)
        is_news = self.run.job is not before
        self.batch_size = found if is_news else self.batch_size
        return is_news

    def take_dataset(self, worker: str, dataset: Dataset, order: str = "") -> bool:
        """A worker has built the dataset; order: digest of its task's sample order. Returns whether
        there are portions from now on. Raises DlctlError if the dataset or the order differs from
        that of other workers or of before.
        """
        is_first = self._pool is None and self._order is None
        known = self.dataset if self._pool else self._built
        self._built = known.met(worker, dataset, resumes=is_first or self._lists_unknown)
        if self._lists_unknown:
            self._built.check_places()
            self.dataset, self._lists_unknown = self._built, False
        if is_first and any(known):
            self._report_changes(worker, known)
        self._check_order(worker, order)
        opens = self._pool is None and not batches.is_open(self.run.job)
        if opens:
            self.open_dataset(self._built)
        self._order = order
        return opens

    def _check_order(self, worker: str, order: str) -> None:
        if self._order not in (None, order):
            raise DlctlError(
                f"the samples of {worker} come in another order than those of the other workers",
                hint="sampler(dataset, epoch) and sample_weights(dataset) must return the same in "
                "every process; what torch, numpy and random draw there does",
            )

    def _report_changes(self, worker: str, saved: Dataset) -> None:
        """What a resumed run finds in its dataset besides what its checkpoint had."""
        if new := self._built.shards - saved.shards:
            text = f"{plural(new, 'shard')} of the stream are new since the checkpoint"
            self.run.context.event("data", worker, text)
        if "" != saved.files != self._built.files != "":
            self._saved = {**self._saved, "portions": []}
            text = "the dataset lists other files than at the checkpoint, or in another order"
            self.run.context.event("data", worker, f"{text}: its data epoch begins again")

    def open_dataset(self, dataset: Dataset) -> None:
        """Cut a dataset into a pool. Raises DlctlError if this job cannot be trained with it."""
        pool = data_pools.build(self.run.job, dataset, self.lead)
        if self._saved:
            pool.restore(self._saved)
        self._pool, self.dataset = pool, dataset

    # ------------------------------------------------------------ persisted state

    def restore(self, saved: Json) -> None:
        """Restore the progress in the data from a checkpoint's manifest."""
        self._saved = saved
        self._built = Dataset.saved(saved)
        self.find_batch_size(saved.get("batch_size", 0))

    def to_json(self) -> Json:
        """The progress in the data, for a checkpoint's manifest."""
        found = {"batch_size": self.batch_size} if self.batch_size else {}
        portion_samples = self.pool.portion_samples
        data = {**self.pool.to_json(), **self.dataset.to_json()}
        return {"portion_samples": portion_samples, **found, **data}

    def changes(self) -> Iterator[Entry | Fields]:
        if self._pool is not None and self._pool.next != self._next:
            self._next = self._pool.next
        if self._is_released != (self.run.released_at is not None):
            self._is_released = not self._is_released
        yield from super().changes()
        yield from self.changed_portions()

    def changed_portions(self) -> Iterator[Entry]:
        for epoch, portion, standing in self._pool.take_changes() if self._pool else ():
            yield Entry(f"{PORTION}{epoch}/{portion}", standing)

    def memory(self) -> Iterator[Entry | Fields]:
        """The persisted values of the data, but for the portions."""
        yield Fields(Work, {"dataset_samples": self.dataset.samples, "next": self._next})
        yield Entry("stream", self.dataset.shards)
        yield Entry("clients", self.dataset.clients)
        yield Entry("names", None if self._lists_unknown else self.dataset.names)
        yield Entry("files", self.dataset.files)
        yield Entry("own_data", self.dataset.is_own)
        # A task may change until its workers are released.
        yield Entry("order", self._order if self._is_released else None)
        yield Entry("batch_size", self.batch_size)

    def recall(self, memory: Memory, now: float) -> None:
        self.find_batch_size(memory.value("batch_size", 0))
        work = memory.work
        shards, clients = memory.value("stream", 0), tuple(memory.value("clients", ()))
        names, files = memory.value("names"), memory.value("files", "")
        dataset = Dataset(
            work.dataset_samples, shards, clients, names or "", files,
            memory.value("own_data", False),
        )  # fmt: skip
        self._lists_unknown = names is None and any(dataset)
        self._order = memory.value("order")
        if any(dataset):
            self._saved = {}
            self.open_dataset(dataset)
            rows = ((key.split("/"), value) for key, value in memory.under(PORTION))
            standing = {(int(epoch), int(portion)): value for (epoch, portion), value in rows}
            self.pool.resume((work.next[0], work.next[1]), standing)
