"""Clusters for the tests of this folder. Where there can be none, their tests say why."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from workplace import Workplace

from .cluster import Cluster, missing
from .jobs import daemons

# It needs packages of other projects, which only `make integrations` installs.
collect_ignore = [] if "DLCTL_INTEGRATIONS" in os.environ else ["test_frameworks_on_hosts.py"]


@pytest.fixture(scope="session")
def possible() -> None:
    if why := missing():
        pytest.skip(f"no cluster: {why}")


@pytest.fixture
def cluster(possible: None) -> Iterator[Cluster]:
    """Three hosts, for this test alone."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared_cluster(possible: None) -> Iterator[Cluster]:
    """Three hosts for all tests of a module, which leave them as they were."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def place(cluster: Cluster) -> Iterator[Workplace]:
    """A place in the lab; that nothing is left there and on the hosts is part of every test."""
    workplace = Workplace(cluster.enter, cluster.env)
    try:
        yield workplace
    finally:
        left = workplace.close()
    assert not left, f"left behind: {left}"
    for name in cluster.names:
        assert not daemons(cluster, name), f"left behind on {name}"
