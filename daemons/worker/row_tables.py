"""Rows of the task's tables: a replica holds only those that its current batches name.

The task returns the rows that a batch needs (`rows(batch)`). They are fetched, and its loss gets
them as autograd leaves, or its `change` as plain tensors. Their change is pushed. Each batch makes
a step of plain SGD on them, along the gradient of the *sum* over its samples: every sample makes
its own step, as in word2vec.c and GloVe, and those of a batch are made at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from daemons.worker.task.user_task import Task, TaskError
from dlctl.model.flat import ROWS, Layout, TensorEntry
from dlctl.shards.rows import RowTables
from dlctl.wire.messages import Array

_TABLE = (
    "a table is (rows, width, init), and init a number, "
    '("uniform", from, to) or ("normal", mean, standard deviation)'
)
MARKED = 16
"""The most rows of a table per named row for which duplicates are found by marks in an array. That
is faster than sorting, and takes much less memory than the fetched rows.
"""


def entries_of(task: Task) -> tuple[TensorEntry, ...]:
    """The task's tables, in their order. Raises TaskError."""
    return tuple(_entry(task, name, table) for name, table in task.tables().items())


def _entry(task: Task, name: str, table: Any) -> TensorEntry:
    try:
        rows, width, init = table
        kind, a, b = init if isinstance(init, tuple) else ("constant", init, 0.0)
        entry = TensorEntry(
            name, ROWS, (int(rows), int(width)), "float32", init=(kind, float(a), float(b))
        )
        Layout.from_bytes(Layout((entry,)).to_bytes())
    except Exception as error:
        raise TaskError(
            f'task.tables()["{name}"] is {table!r:.80}', where=task.place("tables"), hint=_TABLE
        ) from error
    return entry


@dataclass(slots=True)
class _Used:
    """Rows of one table that a batch has named."""

    name: str
    where: Tensor
    """int64[k], their positions among all named rows of the table."""
    rows: Tensor
    """The values of the named rows: k rows in the shape of their indices."""
    change: Tensor | None = None
    """The gradient of each of the k rows, or what is added to it."""


class RowSteps:
    """The row indices of the next batches, and the rows themselves while the batches compute."""

    def __init__(self, task: Task, layout: Layout, device: torch.device) -> None:
        self._task = task
        self._device = device
        self.tables = RowTables(layout)
        self.fetch: Callable[[Array], Array] | None = None
        """Fetches these rows from the servers; set by the compute thread."""
        self._places: list[dict[str, Tensor]] = []
        """One entry for each coming batch: table -> positions among the table's named rows, in the
        shape of the task's indices.
        """
        self._counts: dict[str, int] = {}
        """Table -> number of named rows."""
        self._values: dict[str, Tensor] = {}
        """Table -> its named rows, after the steps so far."""
        self._begun: Array | None = None
        """The fetched rows, before the step."""
        self._used: list[_Used] = []
        """The rows of the batches of the current step."""
        self._rate, self._scale = 0.0, 1.0

    # ------------------------------------------------------------ names

    def name(self, steps: Sequence[Sequence[Any]]) -> Array:
        """The rows that the batches of these steps need: int64[n], ascending, without duplicates.
        Raises TaskError.
        """
        named = [
            self._checked(self._task.rows(batch), "task.rows returned", "rows")
            for batches in steps
            for batch in batches
        ]
        self._places = [{} for _ in named]
        self._counts, found = {}, [np.empty(0, np.int64)]
        for number, entry in enumerate(self.tables.entries):
            having = [i for i, of_batch in enumerate(named) if entry.name in of_batch]
            flat = [named[i][entry.name].numpy().ravel() for i in having]
            rows = np.concatenate(flat) if flat else np.empty(0, np.int64)
            once, where = _unique(rows, entry.shape[0])
            found.append(once + self.tables.rows[number])
            self._counts[entry.name] = len(once)
            at = 0
            for i in having:
                shape = named[i][entry.name].shape
                part = where[at : at + math.prod(shape)].reshape(shape)
                self._places[i][entry.name] = torch.from_numpy(part).to(self._device)
                at += part.size
        return np.concatenate(found)

    def _checked(self, named: Mapping[str, Any], what: str, part: str) -> dict[str, Tensor]:
        """Row indices: int64 on the CPU. Raises TaskError."""
        sizes = {entry.name: entry.shape[0] for entry in self.tables.entries}
        for name, rows in named.items():
            fault = ""
            if name not in sizes:
                fault = f'a table "{name}"; the tables are {", ".join(sizes)}'
            elif not isinstance(rows, Tensor) or rows.dtype not in (torch.int64, torch.int32):
                fault = f'for "{name}" no int64 tensor'
            elif rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= sizes[name]):
                fault = f'for "{name}" rows {int(rows.min())} to {int(rows.max())} of {sizes[name]}'
            if fault:
                raise TaskError(
                    f"{what} {fault}",
                    where=self._task.place(part),
                    hint='as in {"input": centers, "output": targets}, numbers of rows from 0 on',
                )
        return {name: rows.detach().cpu().long() for name, rows in named.items()}

    def read(self, name: str, rows: Tensor) -> Tensor:
        """The current rows of the servers, for the task's `evaluate`. Raises TaskError."""
        rows = self._checked({name: rows}, "task.evaluate asked", "evaluate")[name]
        number = [entry.name for entry in self.tables.entries].index(name)
        entry, flat = self.tables.entries[number], rows.numpy().ravel()
        once, where = _unique(flat, entry.shape[0])
        assert self.fetch is not None
        values = self.fetch(once + self.tables.rows[number]) if once.size else np.zeros(0)
        whole = torch.from_numpy(np.array(values, np.float32)).view(-1, entry.shape[1])
        found = whole.index_select(0, torch.from_numpy(where))
        return found.view(*rows.shape, entry.shape[1]).to(self._device)

    # ------------------------------------------------------------ steps

    def begin(self, values: Array) -> None:
        """Set the fetched rows, in the order of `name`: float32[n]."""
        self._begun, at = values, 0
        for entry in self.tables.entries:
            count, width = self._counts[entry.name], entry.shape[1]
            part = torch.from_numpy(np.array(values[at : at + count * width], np.float32))
            self._values[entry.name] = part.view(count, width).to(self._device)
            at += count * width

    def next_step(self, rate: float, scale: float) -> None:
        """Start a step. rate: along the gradient of the mean. scale: of the loss."""
        self._rate, self._scale = rate, scale
        self._used = []

    def of_next_batch(self) -> dict[str, Tensor]:
        """The rows that the next batch has named, in the shapes of their indices: autograd leaves,
        if the task has no `change`.
        """
        found = {}
        for name, where in self._places.pop(0).items():
            values = self._values[name].index_select(0, where.reshape(-1))
            found[name] = values.view(*where.shape, values.shape[1])
            found[name].requires_grad_(not self._task.has_change)
            self._used.append(_Used(name, where.reshape(-1), found[name]))
        return found

    def add(self, changes: Mapping[str, Tensor]) -> None:
        """Record what the task's `change` adds to the rows."""
        for used in self._used:
            if used.change is None and used.name in changes:
                used.change = changes[used.name].float()

    def gradients(self, *, summed: bool) -> list[Tensor]:
        """The gradients of the mean loss, or what `change` adds. summed: over the duplicates of a
        row.
        """
        found = []
        for used in self._used:
            if used.change is None and used.rows.grad is not None:
                gradient, used.rows.grad = used.rows.grad, None
                used.change = gradient if self._scale == 1.0 else gradient / self._scale
            if used.change is not None:
                found.append((used, used.change.reshape(len(used.where), -1)))
        if not summed:
            return [values for _, values in found]
        sums = {name: torch.zeros_like(self._values[name]) for name in self._counts}
        for used, values in found:
            sums[used.name].index_add_(0, used.where, values)
        return list(sums.values())

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Make the step. factor: by which it was clipped."""
        rate = 1.0 if self._task.has_change else -self._rate
        for used in self._used:
            if used.change is not None:
                values = used.change.reshape(len(used.where), -1)
                self._values[used.name].index_add_(0, used.where, values, alpha=rate * factor)

    @torch.no_grad()
    def changes(self) -> Array:
        """float32[n]: the change of the rows since `begin`. Then drops the rows."""
        parts = [rows.reshape(-1).cpu() for rows in self._values.values()]
        values: Array = torch.cat(parts).numpy() if len(parts) > 1 else parts[0].numpy()
        assert self._begun is not None
        values -= self._begun
        self._begun, self._values, self._places, self._used = None, {}, [], []
        return values


def _unique(rows: Array, size: int) -> tuple[Array, Array]:
    """The unique rows, ascending, and the position of each row among them: int64."""
    if size > MARKED * len(rows):
        once, where = np.unique(rows, return_inverse=True)
        return once, where
    marks = np.zeros(size, bool)
    marks[rows] = True
    once = np.flatnonzero(marks)
    places = np.empty(size, np.int64)
    places[once] = np.arange(len(once))
    return once, places[rows]
