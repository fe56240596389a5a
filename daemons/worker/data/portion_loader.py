"""Batches of a leased portion: a range of samples in the order of a data epoch (`sample_order.py`).

Every worker has the same order. So a portion is two numbers on the wire, and it has the same
batches if another worker takes it over.
"""

from __future__ import annotations

import multiprocessing
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, _utils, default_collate

from daemons.worker.data.data_names import digest_of_files
from daemons.worker.data.loader_stacks import LoaderStacks, answer
from daemons.worker.data.sample_order import Draw, Rows, SampleOrder
from daemons.worker.replica import seed_of
from daemons.worker.task.failures import KILLED, ProcessLost, how_it_ended
from daemons.worker.task.user_task import TaskError, blame, calling, user_line, without_machinery
from dlctl.job.clients import Clients
from dlctl.model.flat import slice_bounds

_CPU = torch.device("cpu")
BLAME_S = 1.0
"""An error in the data of a process may be caused by its death: how long to wait for its exit."""


Collate = Callable[[list[Any]], Any]
"""A list of samples -> a batch."""


def no_errors_from_signals() -> None:
    """Keep torch from installing its SIGCHLD handler, which would raise an error for a dead loader
    at any point of the main thread, also in dlctl's code. The missing batch shows it as well.
    """
    _utils.signal_handling._SIGCHLD_handler_set = True


class PortionLoader:
    """Reads a map-style dataset portion by portion, with `processes` of torch's DataLoader; without
    processes it loads each batch on request.

    collate: makes a batch of a list of samples; None: torch's default_collate. place: file:line of
    the dataset, for errors that no line of the user's code has raised. draw: the order of each data
    epoch, if the task has its own. tolerant: batches leave out samples that fail to load. clients:
    the rows of each client. pieces: each batch is cut into so many, if it has enough samples, and a
    step has so many times more batches. Call `close` to end the processes.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
        processes: int,
        collate: Collate | None = None,
        accumulate: int = 1,
        place: str | None = None,
        draw: Draw | None = None,
        tolerant: bool = False,
        clients: Clients | None = None,
        pieces: int = 1,
    ) -> None:
        self.clients = clients
        self._guarded, length = self._guard(dataset, collate, place, tolerant)
        self.order = SampleOrder(length, seed=seed, shuffle=shuffle, draw=draw)
        self.batch_size = batch_size
        self._accumulate, self._pieces = accumulate, pieces
        self._seed = seed
        self._batches: list[Any] = []
        """The batches of the current pass. torch's DataLoader iterates over this very list."""
        # With a shared generator every portion would shift the replica's dropout.
        self._generator = torch.Generator().manual_seed(seed)
        self._stacks = LoaderStacks()
        self._loader = self._with(processes) if processes else None
        self._place = place
        self._processes: list[BaseProcess] = []
        self._waits = False
        self._stream: Iterator[LoadedBatch | TaskError] = iter(())
        self._next: tuple[int, ...] | None = None
        """The arguments of the step whose batches come next from the stream."""

    def _guard(
        self, dataset: Any, collate: Collate | None, place: str | None, tolerant: bool
    ) -> tuple[Batching, int]:
        """The object that makes batches of the dataset, and the dataset's length."""
        with calling("the list of files of task.dataset()", place):
            self.files = digest_of_files(dataset)
        return _Guarded(dataset, collate, place, tolerant), len(dataset)

    def resize(self, batch_size: int) -> None:
        """Set the largest number of samples in a batch."""
        if batch_size != self.batch_size:
            self.batch_size, self._next = batch_size, None

    def reseed(self, slot: int, term: int) -> None:
        """Seed the loader processes for this term of this slot; call it before the first batch.

        The order of the samples depends on the job's seed alone, and does not change.
        """
        self._generator.manual_seed(seed_of(self._seed, slot, term))

    shards = 0
    """The number of shards of a stream; 0: the dataset is none."""
    names = ""
    """The names of the shards, one a line; "": they have only numbers."""
    files = ""
    """Digest of the files that a map-style dataset lists; "": it lists none."""

    @property
    def digest(self) -> str:
        """A digest of the samples' order, or of the clients; "": the task chooses none."""
        return self.order.digest if self.clients is None else self.clients.digest

    @property
    def identity(self) -> list[Any]:
        """Equal in all processes of a worker: they read one dataset in one order."""
        return [self.order.length, self.digest, self.files]

    def step(self, data_epoch: int, start: int, stop: int, number: int, shard: int = -1) -> Loaded:
        """The batches of step `number` (from 0) of samples [start, stop), cut by `slice_bounds`.

        The batches of a portion are prefetched in order; any other order costs a restart. shard:
        of the stream, or the client, if the dataset is cut into clients. Raises TaskError for what
        the dataset raises, ProcessLost if a loader process has exited.
        """
        assert 0 <= start < stop
        comes_next, self._next = self._next, None
        if comes_next != (data_epoch, start, stop, number, shard):
            steps = range(number, self._steps(stop - start))
            bounds = [bound for step in steps for bound in self._bounds(stop - start, step)]
            self._begin(self._wanted(data_epoch, start, stop, shard, bounds))
        found: list[tuple[Any, int]] = []
        bad: tuple[BadSample, ...] = ()
        for lo, hi in self._bounds(stop - start, number):
            made = self._load()
            bad += made.bad
            if made.samples:
                found.append((made.batch, made.samples))
            if made.samples + len(made.bad) < hi - lo:
                break  # The stream has ended.
        else:
            self._next = (data_epoch, start, stop, number + 1, shard)
        samples = sum(count for _, count in found)
        batches = [(batch, count / samples) for batch, count in found]
        return Loaded(batches, samples, bad, samples if self._next is None else None)

    def _steps(self, samples: int) -> int:
        return -(-samples // (self.batch_size * self._accumulate))

    def _bounds(self, samples: int, number: int) -> list[tuple[int, int]]:
        """The bounds of the batches of a step, for a portion of so many samples."""
        steps = self._steps(samples)
        assert 0 <= number < steps
        begin, end = slice_bounds(samples, steps, number)
        count = min(end - begin, -(-(end - begin) // self.batch_size) * self._pieces)
        if count == 1:
            return [(begin, end)]
        cuts = (slice_bounds(end - begin, count, i) for i in range(count))
        return [(begin + lo, begin + hi) for lo, hi in cuts]

    def _wanted(
        self, data_epoch: int, start: int, stop: int, shard: int, bounds: list[tuple[int, int]]
    ) -> list[Any]:
        """What `Batching.batch` needs for each of these batches of a portion."""
        if self.clients is None or shard < 0:
            assert stop <= self.order.length
            rows = self.order.rows(data_epoch, start, stop)
        else:
            rows = self.clients.rows(data_epoch, shard, start, stop)
        return [rows[lo:hi] for lo, hi in bounds]

    def _load(self) -> LoadedBatch:
        try:
            self._waits = True
            made = next(self._stream)
        except Exception as error:
            if not self._processes:
                raise
            raise self._blame(error) from error
        finally:
            self._waits = False
        if isinstance(made, TaskError):
            raise made
        return made

    def waits_for(self) -> Waits | None:
        """What is known while a batch of the processes is awaited; None: none is. Asks the
        processes where they are, which takes a moment for each.
        """
        if not self._processes or not self._waits:
            return None
        text = f"waiting for a batch from the data loaders, {self._pids}"
        for process in self._processes:
            assert process.pid is not None
            stack = self._stacks.of(process.pid)
            if place := user_line(stack):
                shown = "".join(without_machinery(stack).format())
                return Waits(place, f"{text}; {process.pid} is at {place}", shown)
        return Waits(self._place or "", text, "")

    @property
    def _pids(self) -> str:
        return f"pids {', '.join(str(process.pid) for process in self._processes)}"

    def _blame(self, error: Exception) -> ProcessLost:
        """The cause of an error that torch raises while it waits for the processes. It checks every
        5 s whether one has exited, and does not start another: the worker is replaced.
        """
        wait([process.sentinel for process in self._processes], BLAME_S)
        for process in self._processes:
            if (status := process.exitcode) is not None:
                text = f"data loader process {process.pid} {how_it_ended(status)}"
                if status == KILLED[0]:
                    text += "; if memory ran out (dmesg shows it), lower workers.loader_processes"
                return ProcessLost(text, by_itself=status not in KILLED)
        return ProcessLost(f"no batch from the data loaders, {self._pids}: {error}")

    def close(self) -> None:
        """End the loader's processes."""
        self._stream = iter(())
        self._next = self._loader = None

    def _with(self, processes: int) -> DataLoader[Any]:
        return DataLoader(
            self._guarded,
            batch_sampler=self._batches,
            collate_fn=itemgetter(0),
            num_workers=processes,
            persistent_workers=True,
            worker_init_fn=partial(_begin_process, self._stacks.path),
            generator=self._generator,
        )

    def _begin(self, batches: list[Any]) -> None:
        """Start to load these batches."""
        self._batches[:] = batches
        if self._loader is None:
            self._stream = map(self._guarded.batch, self._batches)
            return
        # Its generator is on the CPU. Setting the device slows its processes down, so this is done
        # only if the task has changed the default device.
        is_default = torch.get_default_device().type == "cpu"
        others = {*multiprocessing.active_children()}
        try:
            with nullcontext() if is_default else _CPU:
                self._stream = iter(self._loader)
        except Exception as error:
            if self._processes:
                raise self._blame(error) from error
            raise blame("starting to load the data", error) from error
        self._processes += {*multiprocessing.active_children()} - others


class Waits(NamedTuple):
    """Where the processes that load data are while a worker waits for a batch."""

    place: str
    """file:line of the user's code where one of them is, or of the dataset; "": unknown."""
    text: str
    """The text of the log line."""
    stack: str
    """The stack of that process, within the user's code; "": unknown."""


class BadSample(NamedTuple):
    """A sample that failed to load."""

    row: int
    error: str
    detail: str
    """The traceback."""


class LoadedBatch(NamedTuple):
    """A batch, from `Batching`."""

    batch: Any
    """The samples, collated; None: there are none."""
    samples: int
    """Fewer than wanted, if some are bad or a stream's shard has ended."""
    bad: tuple[BadSample, ...] = ()


class Loaded(NamedTuple):
    """The batches of a step."""

    batches: list[tuple[Any, float]]
    """Each with its fraction of the step's samples."""
    samples: int
    bad: tuple[BadSample, ...]
    """The samples that the batches leave out."""
    ended_after: int | None
    """The step's samples, if a stream's shard ended within it."""


class Batching(Dataset[Any], ABC):
    """Makes whole batches, and returns the user's errors as values: so they keep their place and
    text when a loader process sends them."""

    def __init__(self, collate: Collate | None, place: str | None) -> None:
        self._collate = collate or default_collate
        self._place = place

    def __getitems__(self, wanted: Any) -> list[Any]:
        """One batch, collated, as a list of one: the interface of torch's DataLoader."""
        return [self.batch(wanted)]

    def batch(self, wanted: Any) -> LoadedBatch | TaskError:
        """The wanted samples, collated."""
        try:
            return self._made(wanted)
        except TaskError as error:
            return error.with_traceback(None)

    @abstractmethod
    def _made(self, wanted: Any) -> LoadedBatch:
        """Make a batch of these samples. Raises TaskError."""


class _Guarded(Batching):
    """Batches of the user's dataset, by the indices of samples."""

    def __init__(
        self,
        dataset: Any,
        collate: Collate | None,
        place: str | None,
        tolerant: bool,
    ) -> None:
        super().__init__(collate, place)
        self._dataset = dataset
        self._tolerant = tolerant
        self._tensors: tuple[Tensor, ...] = ()
        """The tensors of a plain TensorDataset: the rows of a batch are selected at once, with the
        same result as collating them one by one.
        """
        if type(dataset) is TensorDataset and collate is None:
            is_plain = all(type(t) is Tensor and t.layout is torch.strided for t in dataset.tensors)
            self._tensors = dataset.tensors if is_plain else ()

    def _made(self, rows: Rows) -> LoadedBatch:
        """The samples at `rows`; some are left out if the job tolerates that they fail to load."""
        if self._tensors:
            # Converting a list of numbers would take as long as all the rest.
            where = torch.from_numpy(rows)
            with calling("making a batch of samples", self._place):
                batch = [t.index_select(0, where.to(t.device)) for t in self._tensors]
            return LoadedBatch(batch, len(rows))
        samples, bad = self._sifted(rows.tolist())
        if len(samples) + len(bad) != len(rows):
            raise TaskError(
                f"task.dataset().__getitems__ returned {len(samples)} samples for "
                f"{len(rows)} indices",
                where=self._place,
                hint="return one for each index, in their order, or raise an error",
            )
        if not samples:
            return LoadedBatch(None, 0, bad)
        with calling("making a batch of samples", self._place):
            return LoadedBatch(self._collate(samples), len(rows) - len(bad), bad)

    def _sifted(self, indices: list[int]) -> tuple[list[Any], tuple[BadSample, ...]]:
        """The samples, and those whose failure is tolerated."""
        at_once = getattr(self._dataset, "__getitems__", None)
        try:
            if at_once is not None:
                with calling("task.dataset().__getitems__", self._place):
                    return list(at_once(indices)), ()
        except TaskError as error:
            if not self._may_fail(error.__cause__):
                raise
        samples, bad = [], []
        for index in indices:
            try:
                samples.append(self._dataset[index])
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                failed = blame(f"task.dataset()[{index}]", error, self._place)
                if not self._may_fail(error):
                    raise failed from error
                where = f" ({failed.where})" if failed.where else ""
                bad.append(BadSample(index, f"{failed.message}{where}", failed.detail))
        return samples, tuple(bad)

    def _may_fail(self, error: BaseException | None) -> bool:
        """Whether the batch leaves out the sample; not if the process may be the cause."""
        is_of_process = not isinstance(error, Exception) or isinstance(error, MemoryError)
        return self._tolerant and not is_of_process


def _begin_process(stacks: str, _: int) -> None:
    """Ctrl-C reaches the whole process group; the worker decides when its loaders end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    answer(stacks)
