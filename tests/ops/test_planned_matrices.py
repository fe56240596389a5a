"""`dlctl plan` tells the memory that an optimiser needs beside matrices before it is started."""

from __future__ import annotations

import pytest

from dlctl.health import needs
from dlctl.health.needs import Model
from dlctl.job.config import Choice, Job, JobFile, Servers, Workers
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.ops import plan

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
