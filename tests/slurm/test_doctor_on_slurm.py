"""`dlctl doctor` on a real Slurm: bad partitions, and a control job that no node reaches."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from hosts.jobs import ENDLESS, SLOW_S
from workplace import Workplace

from . import slurm_cluster
from .slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.root, pytest.mark.long]

PARTITIONS = """PartitionName=cpu Nodes=h1 PreemptMode=OFF PriorityTier=1
PartitionName=down Nodes=h2 State=DOWN
PartitionName=drained Nodes=h2 State=DRAIN
PartitionName=short Nodes=h3 MaxTime=10
PartitionName=empty
"""
PORT = 7000
Finding = dict[str, Any]


@pytest.fixture
def slurm(slurm_is_possible: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """With some partitions more."""
    monkeypatch.setattr(slurm_cluster, "CONF", slurm_cluster.CONF + PARTITIONS)
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def place(slurm: SlurmCluster) -> Iterator[Workplace]:
    """A place on the file system that all nodes share."""
    workplace = Workplace(slurm.cluster.enter, slurm.cluster.env, within=slurm.directory)
    workplace.task(pause_s=SLOW_S)
    try:
        yield workplace
    finally:
        left = workplace.close()
    assert not left, f"left behind: {left}"
    assert not slurm.jobs(), "a job is left"


def doctor(place: Workplace, slurm: SlurmCluster, *options: str, **keys: str) -> list[Finding]:
    keys = {"jobs": '"each"', "nodes": "2", "control": '{ partition = "cpu" }', **keys}
    more = slurm.section(**keys) + f"[network]\nport = {PORT}\n"
    place.job(stop=ENDLESS, servers=1, workers=2, more_servers='durability = "disk"', more=more)
    ended = place.dlctl("doctor", "job.toml", "--json", *options)
    found: list[Finding] = json.loads(ended.out)["findings"]
    assert ended.code == (1 if faults(found) else 0), ended.err
    return found


def faults(found: list[Finding], mark: str = "fault") -> list[tuple[str, str]]:
    return [(f["subject"], f["found"]) for f in found if f["mark"] == mark]


def test_partitions_are_judged_those_of_workers_and_of_the_control_job(
    slurm: SlurmCluster, place: Workplace
) -> None:
    found = doctor(place, slurm)
    assert not faults(found)
    assert not faults(found, "warning")
    preempted = [f["found"] for f in found if f["subject"] == "PreemptMode"]
    assert ["not preempted" in text for text in preempted] == [False, True]
    for of_workers, of_control, subjects in (
        ("nope", "cpu", ["partition"]),
        ("down", "drained", ["partition", "partition"]),
        ("empty", "nope", ["nodes", "partition"]),
    ):
        control = f'{{ partition = "{of_control}" }}'
        found = doctor(place, slurm, partition=f'"{of_workers}"', control=control)
        assert [subject for subject, _ in faults(found)] == subjects
    found = doctor(
        place, slurm, partition='"short"', time='"2h"', control='{ partition = "short" }'
    )
    assert [subject for subject, _ in faults(found)] == ["time"]
    assert [s for s, _ in faults(found, "warning")] == ["time", "PreemptMode"]
    slurm.run("scontrol", "update", "nodename=h1", "state=drain", "reason=bad disk")
    (fault,) = faults(doctor(place, slurm))
    assert "bad disk" in fault[1]


def test_a_control_job_that_workers_cannot_reach_is_found_before_the_start(
    slurm: SlurmCluster, place: Workplace
) -> None:
    found = doctor(place, slurm, "--nodes")
    assert not faults(found)
    links = {f["subject"] for f in found if f["place"] == "links"}
    assert (
        links == {f"{node} -> the coordinator's node" for node in ("h1", "h2")} or len(links) == 1
    )
    rule = ["iptables", "-A", "INPUT", "-p", "tcp", "--dport", str(PORT), "-s", "10.0.0.0/8"]
    subprocess.run([*slurm.cluster.inside("h1"), *rule, "-j", "DROP"], check=True)
    unreached = faults(doctor(place, slurm, "--nodes"))
    assert unreached
    assert all(str(PORT) in text for _, text in unreached)
    slurm.run("scontrol", "update", "nodename=h1", "state=drain", "reason=bad disk")
    found = doctor(place, slurm, "--nodes")
    assert [f["mark"] for f in found if f["place"] == "the coordinator's node"] == ["warning"]
