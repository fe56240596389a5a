"""Clusters with Slurm for the tests of this folder; where there can be none, these say why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from workplace import Workplace

from .slurm_cluster import SlurmCluster, missing


@pytest.fixture(scope="session")
def slurm_is_possible() -> None:
    if why := missing():
        pytest.skip(f"no Slurm: {why}")


@pytest.fixture
def slurm(slurm_is_possible: None) -> Iterator[SlurmCluster]:
    """Three nodes, for this test alone."""
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def place(slurm: SlurmCluster) -> Iterator[Workplace]:
    """A place in the lab; that nothing is left there, on the nodes and in Slurm's queue is part of
    every test.
    """
    workplace = Workplace(slurm.cluster.enter, slurm.cluster.env)
    try:
        yield workplace
    finally:
        left = workplace.close()
    assert not left, f"left behind: {left}"
    assert not slurm.jobs(), "a job is left"
    assert not slurm.orders(), "orders, or the directory they were in, are left"
    for name in slurm.living():
        assert not slurm.daemons(name), f"left behind on {name}"
        assert not slurm.files(name), f"left behind on {name}"
