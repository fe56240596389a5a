"""Rows of the task's tables, of which a replica has those that its batches name, for a moment.

The task says which rows a batch needs (`rows(batch)`); they are fetched, and its loss gets them as
leaves of autograd, or its `change` as they are. What is pushed is how they have changed. Each batch
makes a step of plain SGD on them, along the gradient of the *sum* over its samples: every sample
has a step of its own as in word2vec.c and GloVe, and those of a batch are made at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from daemons.worker.task import Task, TaskError
from dlctl.flat import ROWS, Entry, Layout
from dlctl.messages import Array
from dlctl.rows import RowTables

_TABLE = (
    "a table is (rows, width, init), and init a number, "
    '("uniform", from, to) or ("normal", mean, standard deviation)'
)
MARKS_MAX = 1 << 24
"""Rows of a table up to which those that are named are marked in an array, which is faster than
sorting."""


def entries_of(task: Task) -> tuple[Entry, ...]:
    """The task's tables, in their order. Raises TaskError."""
    return tuple(_entry(task, name, table) for name, table in task.tables().items())


def _entry(task: Task, name: str, table: Any) -> Entry:
    try:
        rows, width, init = table
        kind, a, b = init if isinstance(init, tuple) else ("constant", init, 0.0)
        entry = Entry(
            name, ROWS, (int(rows), int(width)), "float32", init=(kind, float(a), float(b))
        )
        Layout.from_bytes(Layout((entry,)).to_bytes())
    except Exception as error:
        raise TaskError(
            f'task.tables()["{name}"] is {table!r:.80}', where=task.place("tables"), hint=_TABLE
        ) from error
    return entry


class RowSteps:
    """What the batches that come next have named, and the rows themselves while they compute."""

    def __init__(self, task: Task, layout: Layout, device: torch.device) -> None:
        self._task = task
        self._device = device
        self.tables = RowTables(layout)
        self._places: list[dict[str, Tensor]] = []
        """Of each batch that is ahead: table -> which of its leaf's rows, shaped as the task has
        named them."""
        self._counts: dict[str, int] = {}
        """Table -> rows that are named."""
        self._leaves: dict[str, Tensor] = {}
        self._begun: Array | None = None
        """The values as they came."""
        self._at: dict[str, Tensor] = {}
        """The places of the newest batch."""
        self._added: dict[str, Tensor] = {}
        """What the task's own `change` adds in this step."""
        self._rate, self._scale = 0.0, 1.0

    # ------------------------------------------------------------ names

    def name(self, steps: Sequence[Sequence[Any]]) -> Array:
        """The rows that the batches of these steps need: int64[n], ascending, each once. Raises
        TaskError.
        """
        named = [self._named(batch) for batches in steps for batch in batches]
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

    def _named(self, batch: Any) -> dict[str, Tensor]:
        """What the task says of a batch, checked: int64 on the CPU."""
        named = self._task.rows(batch)
        sizes = {entry.name: entry.shape[0] for entry in self.tables.entries}
        for name, rows in named.items():
            fault = ""
            if name not in sizes:
                fault = f'a table "{name}", and there are {", ".join(sizes)}'
            elif not isinstance(rows, Tensor) or rows.dtype not in (torch.int64, torch.int32):
                fault = f'for "{name}" no int64 tensor'
            elif rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= sizes[name]):
                fault = f'for "{name}" rows {int(rows.min())} to {int(rows.max())} of {sizes[name]}'
            if fault:
                raise TaskError(
                    f"task.rows returned {fault}",
                    where=self._task.place("rows"),
                    hint='as in {"input": centers, "output": targets}, numbers of rows from 0 on',
                )
        return {name: rows.detach().cpu().long() for name, rows in named.items()}

    # ------------------------------------------------------------ steps

    def begin(self, values: Array) -> None:
        """These are the rows, in the order of their names: float32[n]."""
        self._begun, at = values, 0
        for entry in self.tables.entries:
            count, width = self._counts[entry.name], entry.shape[1]
            part = torch.from_numpy(np.array(values[at : at + count * width], np.float32))
            leaf = part.view(count, width).to(self._device)
            self._leaves[entry.name] = leaf.requires_grad_(not self._task.has_change)
            at += count * width

    def next_step(self, rate: float, scale: float) -> None:
        """A step begins, of this rate along the gradient of the mean. scale: of its loss."""
        self._rate, self._scale = rate, scale
        self._added = {}
        for leaf in self._leaves.values():
            leaf.grad = None

    def of_next_batch(self) -> dict[str, Tensor]:
        """The rows that it has named, in the shapes of their names."""
        self._at = self._places.pop(0)
        return {
            name: functional.embedding(where, self._leaves[name])
            for name, where in self._at.items()
        }

    def add(self, changes: Mapping[str, Tensor]) -> None:
        """What the task's own `change` adds to these."""
        for name, change in changes.items():
            if name not in self._added:
                self._added[name] = torch.zeros_like(self._leaves[name])
            rows = change.reshape(-1, change.shape[-1]).float()
            self._added[name].index_add_(0, self._at[name].reshape(-1), rows)

    def gradients(self) -> list[Tensor]:
        """Of the mean loss; or what is added in place of a step along it."""
        if self._task.has_change:
            return list(self._added.values())
        found = [leaf.grad for leaf in self._leaves.values() if leaf.grad is not None]
        if self._scale != 1.0:
            for gradient in found:
                gradient /= self._scale
            self._scale = 1.0
        return found

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Make it, `factor` times as long: it was clipped."""
        for name, leaf in self._leaves.items():
            if name in self._added:
                leaf.add_(self._added[name], alpha=factor)
            elif leaf.grad is not None:
                leaf.add_(leaf.grad, alpha=-self._rate * factor)
                leaf.grad = None

    @torch.no_grad()
    def changes(self) -> Array:
        """float32[n]: how the rows have changed since `begin`, of which nothing is kept."""
        parts = [leaf.detach().reshape(-1).cpu() for leaf in self._leaves.values()]
        values: Array = torch.cat(parts).numpy() if len(parts) > 1 else parts[0].numpy()
        assert self._begun is not None
        values -= self._begun
        self._begun, self._leaves, self._places = None, {}, []
        return values


def _unique(rows: Array, size: int) -> tuple[Array, Array]:
    """Each of them once, ascending, and the place there of each: int64."""
    if size > MARKS_MAX:
        once, where = np.unique(rows, return_inverse=True)
        return once, where
    marks = np.zeros(size, bool)
    marks[rows] = True
    once = np.flatnonzero(marks)
    places = np.empty(size, np.int64)
    places[once] = np.arange(len(once))
    return once, places[rows]
