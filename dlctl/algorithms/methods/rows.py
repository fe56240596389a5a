"""Rows of tables that only the servers hold: Downpour SGD (Dean et al. 2012) for embeddings.

A batch of text or of clicks needs few rows of a large embedding. The tables of the task
(`tables()`) are cut over the servers by rows, and no worker ever has all of them:

    loop:
        rows = those that the next batches name                     # the task's rows(batch)
        values = fetch them, and the model's other parameters
        for each batch: values -= alpha * gradient of the sum of its samples' losses
        push how the values have changed; push the gradient of the other parameters

The servers add pushes to their rows, at once and in order of arrival. As in Downpour no replica
waits for others; a replica reads its own writes, so that one worker alone is the same loop on one
machine. alpha is the rate of `[inner]`, which makes plain SGD's step on rows whatever its name is,
and follows the schedule. Mikolov et al. trained word2vec like this on DistBelief (2013). `steps`
batches share one fetch and one push of their rows, and each makes its own step on the rows, as
Downpour with n_fetch = n_push = `steps`.

A task may compute the changes of its rows on its own, instead of a loss (`change(...)`): with
AdaGrad, for example, whose accumulators are rows of another table.

The other parameters, if the model has any, are trained as by Downpour with n_fetch = n_push = 1:
the replica's own optimiser steps along the gradient, and the servers' optimiser takes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge

from dlctl.algorithms.base import (
    MODEL,
    Fault,
    Method,
    Needs,
    ReplicaSide,
    Shape,
    Table,
    all_rows,
)
from dlctl.algorithms.methods.downpour import Server
from dlctl.algorithms.needs import Gradient, Named, NextRows, Read, Step, View, Write
from dlctl.errors import JobFailed
from dlctl.job.config import Choice, JobFile
from dlctl.job.inner import NONE
from dlctl.model.flat import ROWS as OF_ROWS
from dlctl.shards.rows import KIND as TABLE


@dataclass(slots=True, kw_only=True)
class Options:
    steps: Annotated[int, Ge(1)] = 1
    """Batches whose rows are fetched and pushed together; each of them makes a step on these rows.
    More batches need less traffic; but with many workers, the steps of other workers that a batch
    has not seen add up to steps that are too long. More than 1 only without other parameters."""
    overlap: bool = True
    """Compute while fetches of the other parameters are in flight; false: wait for each."""


class Replica(ReplicaSide):
    options: Options

    def changes_parameters(self) -> bool:
        return self.has_inner

    def run(self) -> Needs:
        has_model, has_rows = len(self.parameters) > 0, self.layout.size(OF_ROWS) > 0
        if has_model and self.options.steps > 1:
            raise JobFailed(
                "algorithm.steps is for models whose parameters are all rows",
                hint=f"this one has {len(self.parameters)} others: steps = 1",
            )
        while True:
            named: Named | None = yield NextRows(steps=self.options.steps)
            if named is None:
                continue
            yield Read(wait=not self.options.overlap)
            values = np.zeros(0, np.float32) if has_rows else None
            if named.rows.size:
                view: View = yield Read(
                    table=TABLE, rows=named.rows, into="beside", wait=True, after_own=True
                )
                values = view.values
            computed: Step | None = yield Gradient(
                step=self.has_inner, gather=has_model, steps=named.steps, rows=values
            )
            if computed is None:
                continue
            if named.rows.size:
                yield Write(table=TABLE, vector=computed.rows, rows=named.rows, given=True)
            gradient = computed.gradient if has_model else self.parameters
            yield Write(vector=gradient, samples=computed.samples)


def check(job: JobFile) -> list[Fault]:
    """Rows have no other steps than the replicas', and a batch that is tried has no rows."""
    found: list[Fault] = []
    if job.inner.name == NONE:
        found.append(
            (("inner", "name"), "rows are changed by the replicas' own steps", 'use "sgd"')
        )
    if job.workers.batch_size == "auto":
        found.append(
            (("workers", "batch_size"), "it cannot be tried without rows", "give a number")
        )
    return found


ROWS = Method(
    Options=Options,
    replica=Replica,
    shard=Server,
    shape=Shape(tables=(MODEL, Table(name=TABLE, rule="add", size=all_rows, of_rows=True))),
    inner=Choice(name="sgd", options={"lr": 0.025}),
    check=check,
)
