"""`dlctl doctor` on three hosts: good ones are found good, every planted fault is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from integ.workplace import Ended, Workplace

from .cluster import Cluster

pytestmark = pytest.mark.root

PORT = 7000
WITHOUT_WORKERS = '[[hosts]]\nssh = "{}"\nworkers = 0\n'
LIGHT = (
    f'[[hosts]]\nssh = "h1"\nworkers = 1\n{WITHOUT_WORKERS.format("h2")}'
    f"{WITHOUT_WORKERS.format('h3')}[network]\nport = {PORT}\n"
)
"""One worker, on h1, because to import torch takes long; a server on each of h1, h2 and h3."""
Finding = dict[str, Any]


@pytest.fixture
def place(cluster: Cluster) -> Iterator[Workplace]:
    yield from _place(cluster)


@pytest.fixture
def shared_place(shared_cluster: Cluster) -> Iterator[Workplace]:
    yield from _place(shared_cluster)


def _place(cluster: Cluster) -> Iterator[Workplace]:
    workplace = Workplace(cluster.enter, cluster.env)
    workplace.job(servers=3, workers=1, more=LIGHT)
    try:
        yield workplace
    finally:
        left = workplace.close()
    assert not left
    for name in cluster.names:
        assert not cluster.processes(name), f"left behind on {name}"


def doctor(place: Workplace, *options: str) -> tuple[Ended, list[Finding]]:
    ended = place.dlctl("doctor", "job.toml", "--json", *options)
    return ended, json.loads(ended.out)["findings"] if ended.out else []


def wrong(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(f["place"], f["subject"], f["mark"]) for f in findings if f["mark"] != "ok"]


def only(findings: list[Finding], subject: str, place: str = "links") -> Finding:
    (found,) = [f for f in findings if f["place"] == place and f["subject"] == subject]
    return found


def test_nothing_is_wrong_with_good_hosts_and_every_link_is_measured(
    shared_cluster: Cluster, shared_place: Workplace
) -> None:
    shared_cluster.shape("h2", 100.0)
    ended, findings = doctor(shared_place)
    shared_cluster.shape("h2")
    print(ended.out, ended.err)
    assert wrong(findings) == []
    assert ended.code == 0
