"""`dlctl plan` tells the memory that an optimiser, or a method, needs beside matrices, before it is
started.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from matrix_shards import shard_of

from dlctl import registry
from dlctl.compress.base import Delta
from dlctl.errors import UsageError
from dlctl.health import needs
from dlctl.health.needs import Model
from dlctl.job.config import Choice, Job, JobFile, Servers, Workers
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.ops import built_model, plan
from dlctl.optim import on_shard
from dlctl.optim.matrices import kept_of
from dlctl.shards.memory import in_memory

LAYOUT = Layout(
    tuple(
        TensorEntry(name, TRAINED, shape, "float32")
        for name, shape in {"a": (300, 20), "a.bias": (300,), "b": (10, 300)}.items()
    )
)
ELEMENTS = 300 * 20 + 300 + 10 * 300
A, B = 4 * 2 * (300**2 + 20**2), 4 * 2 * (10**2 + 300**2)


def job(name: str, servers: int = 2) -> JobFile:
    return JobFile(
        job=Job(name="x", task="none"),
        optimizer=Choice(name=name, options={}),
        servers=Servers(count=servers, durability="process"),
        workers=Workers(count=1),
    )


@pytest.mark.parametrize("kept_bytes", [0, 4000])
def test_each_server_has_its_own_matrices(kept_bytes: int) -> None:
    """Of the checkpoint only the vectors count: it may be of another optimiser."""
    model = Model(LAYOUT, 12 * ELEMENTS + kept_bytes, 7, kept_bytes)
    of_elements = plan.placed(job("adam"), model)
    assert [row.matrix_bytes for row in of_elements if row.name.startswith("server")] == [0, 0]
    first, second = (r for r in plan.placed(job("soap"), model) if r.name.startswith("server"))
    assert (first.parameters, second.parameters) == (6000, 3300)
    assert (first.matrix_bytes, second.matrix_bytes) == (A, B)
    assert (first.size_bytes, second.size_bytes) == (12 * 6000 + A, 12 * 3300 + B)
    assert sum(r.matrix_bytes or 0 for r in plan.placed(job("muon"), model)) == 0


def test_shared_memory_is_needed_for_them_as_well() -> None:
    model = Model(LAYOUT, 12 * ELEMENTS, 7)
    adam, soap = (needs.of(job(name), model)["agent-0"].shm_bytes for name in ("adam", "soap"))
    assert soap - adam == pytest.approx((A + B) * needs.STATE_PARTS, abs=2)


@pytest.mark.parametrize("name", ["sgd", "adam", "muon", "soap", "shampoo", "lmo", "isotropic"])
@pytest.mark.parametrize("servers", [1, 2])
def test_the_memory_that_is_planned_is_that_of_the_arrays(name: str, servers: int) -> None:
    of = job(name, servers)
    model = built_model.of_layout(of, LAYOUT)
    rows = [row for row in plan.placed(of, model) if row.name.startswith("server")]
    at, kind = 0, registry.load("optimizers", name)
    for row in rows:
        assert row.parameters
        assert row.size_bytes
        optimizer = on_shard.make(kind, {}, (), LAYOUT, at, at + row.parameters)
        if kept_of(optimizer) is None:
            shard = in_memory(optimizer, np.zeros(row.parameters, np.float32))
        else:
            shard = shard_of(optimizer, row.parameters)
        shard.apply(Delta(np.ones(row.parameters, np.float32)))
        arrays = [shard.w, *shard.slots.values(), *(shard.storage.kept or {}).values()]
        assert row.size_bytes == pytest.approx(sum(a.nbytes for a in arrays), rel=0.1)
        at += row.parameters


def test_a_model_that_cannot_be_cut_for_so_many_servers_is_no_plan() -> None:
    of = job("soap", 400)
    with pytest.raises(UsageError, match="302"):
        plan.placed(of, built_model.of_layout(of, LAYOUT))


def test_a_matrix_that_is_too_large_is_in_the_plan() -> None:
    of = job("soap")
    of = dataclasses.replace(of, optimizer=Choice(name="soap", options={"max_dim": 100}))
    remarks = plan.remarks(of, built_model.of_layout(of, LAYOUT))
    assert [remark.partition(":")[0] for remark in remarks] == ["a", "b"]
    assert plan.remarks(job("soap"), built_model.of_layout(job("soap"), LAYOUT)) == []
    assert plan.remarks(of, None) == []


def test_each_worker_has_the_factors_of_all_layers() -> None:
    """Per side n: a triangle, a sum n^2, n eigenvectors and eigenvalues. One that is too long has
    none; so has a layer that is skipped.
    """
    weights = {"a.weight": (30, 20), "a.bias": (30,), "b.weight": (10, 3, 2, 2), "c": (5, 5)}
    shapes = (TensorEntry(name, TRAINED, shape, "float32") for name, shape in weights.items())
    model = built_model.of_layout(job("sgd", 0), Layout(tuple(shapes)))

    def kept(**options: object) -> int | None:
        method = Choice(name="kfac", options=options)
        file = dataclasses.replace(job("sgd", 0), algorithm=method)
        (row,) = (row for row in plan.placed(file, model) if row.name == "worker-0")
        assert plan.placed(file, None)[-1].method_bytes is None
        return row.method_bytes

    def of_side(n: int) -> int:
        return n * (n + 1) // 2 + n * n + n * (n + 1)

    marks = 3
    b = marks + of_side(12) + of_side(10)
    assert kept() == 4 * (marks + of_side(21) + of_side(30) + b)
    assert kept(max_dim=29) == 4 * (marks + of_side(21) + b)
    assert kept(skip=("a",)) == 4 * b
    other = dataclasses.replace(job("sgd", 0), algorithm=Choice(name="allreduce", options={}))
    assert {row.method_bytes or 0 for row in plan.placed(other, model)} == {0}
