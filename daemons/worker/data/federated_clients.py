"""Clients of federated training: the dataset of a task, partitioned by the job file."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, TensorDataset

from daemons.worker.task.user_task import Task, TaskError, calling, is_stream
from dlctl import registry
from dlctl.job.clients import Clients, cut, epoch_samples
from dlctl.job.config import JobFile

_LABELS = ("targets", "labels")


def dataset_of(job: JobFile, task: Task) -> Any:
    """The task's dataset, or one that loads each client's on demand. Raises TaskError."""
    is_apart = job.data.clients and job.data.partition == "workers"
    return OfClients(task, job.data.clients) if is_apart else task.dataset()


class OfClients(Dataset[Any]):
    """The concatenated datasets of all clients; each is created when it is first used."""

    def __init__(self, task: Task, clients: int) -> None:
        self.sizes = task.client_sizes(clients)
        self._task = task
        self._ends = np.cumsum(self.sizes)
        self._made: dict[int, Any] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, row: int) -> Any:
        client = int(np.searchsorted(self._ends, row, side="right"))
        if client not in self._made:
            self._made[client] = self._task.client_dataset(client, int(self.sizes[client]))
        return self._made[client][row - int(self._ends[client] - self.sizes[client])]

    def parts(self) -> list[npt.NDArray[np.int64]]:
        """The rows of each client."""
        return np.split(np.arange(len(self)), self._ends[:-1])


def clients_of(job: JobFile, task: Task, dataset: Any) -> Clients | None:
    """The clients of the job; None: it has none. Raises TaskError if the dataset cannot be
    partitioned.
    """
    data, place = job.data, task.place("dataset")
    if not data.clients:
        return None
    if is_stream(dataset) or task.has("sampler") or task.has("sample_weights"):
        raise TaskError(
            "data.clients cuts a dataset into clients, but this one has an order of its own",
            where=place,
            hint="return a dataset with __len__ and __getitem__; no sampler or sample_weights",
        )
    if isinstance(dataset, OfClients):
        parts = dataset.parts()
    elif data.partition == "task":
        owners = task.clients(dataset, data.clients)
        order = np.argsort(owners, kind="stable")
        parts = np.split(order, np.searchsorted(owners[order], np.arange(1, data.clients)))
    else:
        labels = partial(_labels, dataset, place)
        try:
            parts = cut(
                len(dataset), data.clients, data.partition, alpha=data.alpha, seed=job.job.seed,
                labels=labels,
            )  # fmt: skip
        except ValueError as error:
            hint = "lower data.clients"
            raise TaskError(f"data.clients: {error}", where=place, hint=hint) from None
    empty = [number for number, part in enumerate(parts) if not len(part)]
    if empty:
        raise TaskError(
            f"task.clients leaves client {empty[0]} of {data.clients} without a sample",
            where=task.place("clients"),
            hint="every number below data.clients must occur at least once",
        )
    return Clients(parts, seed=job.job.seed, shuffle=data.shuffle)


def round_samples(job: JobFile, clients: Clients) -> int:
    """Samples of a data epoch, on average."""
    method = registry.load("algorithms", job.algorithm.name)
    lead = method.lead(method.Options(**job.algorithm.options))
    return epoch_samples(clients.sizes, lead.cohort(len(clients.sizes)))


def _labels(dataset: Any, place: str | None) -> npt.NDArray[np.int64]:
    """int64[samples]: the label of each sample. Raises TaskError."""
    with calling("task.dataset(): its labels", place):
        found = next((getattr(dataset, n) for n in _LABELS if hasattr(dataset, n)), None)
        if found is None and type(dataset) is TensorDataset:
            found = dataset.tensors[-1]
        if found is None:
            found = [int(dataset[row][-1]) for row in range(len(dataset))]
        labels = torch.as_tensor(found).cpu().numpy()
    if labels.shape != (len(dataset),) or labels.dtype.kind not in "iub":
        raise TaskError(
            f"data.partition needs a label for each of {len(dataset)} samples; the dataset has "
            f"{labels.dtype} of the shape {list(labels.shape)}",
            where=place,
            hint='add `targets`, whole numbers, to it, or set partition = "iid" or "task"',
        )
    return labels.astype(np.int64)
