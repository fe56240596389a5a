"""`dlctl doctor` on three hosts: good ones are found good, every planted fault is named."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from workplace import Ended, Workplace

from dlctl import __version__
from dlctl.health.needs import HERE

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


def write(place: Workplace, hosts: str) -> None:
    place.job(servers=3, workers=1, more=hosts)


@pytest.mark.long
def test_nothing_is_wrong_with_good_hosts_and_every_link_is_measured(
    shared_cluster: Cluster, shared_place: Workplace
) -> None:
    shared_cluster.shape("h2", 100.0)
    shared_cluster.shape("h3", delay_ms=10.0)
    ended, findings = doctor(shared_place)
    shared_cluster.shape("h2")
    shared_cluster.shape("h3")
    assert wrong(findings) == []
    assert ended.code == 0
    assert not (shared_place.path / "runs").exists(), "nothing is made"
    links = [f["subject"] for f in findings if f["place"] == "links"]
    assert links == [
        "h1 -> this machine", "h1 -> h2", "h1 -> h3", "h2 -> this machine", "h3 -> this machine",
    ]  # fmt: skip
    slow, far = only(findings, "h1 -> h2")["facts"], only(findings, "h1 -> h3")["facts"]
    for way in ("up", "down"):
        assert 7e6 < slow[f"{way}_bytes_per_s"] < 12.6e6, "100 Mbit/s"
    assert slow["round_trip_s"] < 0.015
    assert 0.02 <= far["round_trip_s"] < 0.1
    near = only(findings, "h1 -> this machine")["facts"]
    assert near["up_bytes_per_s"] > 20e6
    assert abs(only(findings, "clock", "h1")["facts"]["offset_s"]) < 0.1


class Fault(NamedTuple):
    """A set-up that is wrong in one way, and how that is told."""

    plant: Callable[[Cluster, Workplace], None]
    place: str
    subject: str
    mark: str
    found: str
    fix: str


def replace(old: str, new: str) -> Callable[[Cluster, Workplace], None]:
    """Another text in the job file."""
    return lambda _, place: write(place, LIGHT.replace(old, new))


FAULTS = {
    "wrong key": Fault(
        lambda cluster, _: cluster.break_key("h2"),
        "h2", "ssh", "fault", "Permission denied (publickey)", "ssh-copy-id h2",
    ),
    "host name that does not resolve": Fault(
        replace('ssh = "h3"', 'ssh = "h3.invalid"'),
        "h3.invalid", "ssh", "fault", "Could not resolve hostname h3.invalid", "correct ssh in",
    ),
    "firewalled data port": Fault(
        lambda cluster, _: cluster.firewall("h2", [PORT + 2]),
        "links", "h1 -> h2", "fault", f"port {PORT + 2}: a firewall drops packets",
        f"tcp dport {PORT + 2} accept",
    ),
    "version skew": Fault(
        lambda cluster, _: cluster.other_version("h3", "9.8.7"),
        "h3", "dlctl", "fault", "9.8.7 with protocol", f"install dlctl {__version__}",
    ),
    "read-only home": Fault(
        lambda cluster, _: cluster.read_only_home("h2"),
        "h2", "files", "fault", "/root is on a file system that is read-only", "set dir of this",
    ),
    "tiny /dev/shm": Fault(
        lambda cluster, _: cluster.small_shm("h2", 1 << 20),
        "h2", "/dev/shm", "warning", "1.05 MB free", "mount -o remount,size=",
    ),
    "wrong interface": Fault(
        replace('ssh = "h2"', 'ssh = "h2"\ndata = "10.88.0.1"'),
        "h2", "server-1", "fault", "10.88.0.1 is not an address of this host; it has lo 127.0.0.1, "
        "::1; eth0 10.99.1.2", "set data (or bind)",
    ),
    "no torch on one host": Fault(
        lambda cluster, _: cluster.hide_torch("h1"),
        "h1", "torch", "fault", "No module named 'torch'", "pip install torch",
    ),
    "clock an hour off": Fault(
        lambda cluster, _: cluster.fake_clock("h3", 3600),
        "h3", "clock", "fault", "3600 s ahead of this machine", "set-ntp",
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_named_with_its_fix_and_nothing_else_is(
    name: str, cluster: Cluster, place: Workplace
) -> None:
    fault = FAULTS[name]
    fault.plant(cluster, place)
    ended, findings = doctor(place)
    assert wrong(findings) == [(fault.place, fault.subject, fault.mark)]
    found = only(findings, fault.subject, fault.place)
    assert fault.found in found["found"]
    assert fault.fix in found["fix"]
    assert ended.code == (fault.mark == "fault")


@contextmanager
def taken(cluster: Cluster, host: str, port: int) -> Iterator[None]:
    """A process of this host listens there."""
    script = f"import socket; s = socket.create_server(('', {port})); print(1, flush=True); input()"
    command = [cluster.python, "-c", shlex.quote(script)]
    with subprocess.Popen(
        [*cluster.enter, "ssh", host, *command], stdin=-1, stdout=-1, env=cluster.env
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        yield
        process.communicate(b"\n")


def test_several_faults_are_named_at_once_and_the_rest_is_looked_at_all_the_same(
    shared_cluster: Cluster, shared_place: Workplace
) -> None:
    write(shared_place, LIGHT.replace('ssh = "h3"', 'ssh = "h3"\nbind = "10.88.0.1"'))
    shared_cluster.break_key("h1")
    shared_cluster.firewall("h2", [PORT + 2])  # h1 would notice, and is not there.
    with taken(shared_cluster, "h2", PORT + 2):
        ended, findings = doctor(shared_place)
    shared_cluster.mend_key("h1")
    shared_cluster.firewall("h2", [])
    assert ended.code == 1
    assert [each for each in wrong(findings) if each[2] == "fault"] == [
        ("h1", "ssh", "fault"),
        ("h2", "server-1", "fault"),
        ("h3", "server-2", "fault"),
    ]
    assert "Permission denied (publickey)" in only(findings, "ssh", "h1")["found"]
    owner = only(findings, "server-1", "h2")
    assert f"port {PORT + 2} is taken by pid {owner['facts']['owner']['pid']}: " in owner["found"]
    assert "socket.create_server" in owner["found"]
    assert "10.88.0.1 is not an address of this host" in only(findings, "server-2", "h3")["found"]
    assert "MB/s" in only(findings, "h2 -> this machine")["found"].replace("GB/s", "MB/s")


def test_a_host_that_the_job_does_not_have_is_refused_with_those_that_it_has(
    shared_place: Workplace,
) -> None:
    ended = shared_place.dlctl("doctor", "job.toml", "--host", "h4")
    assert ended.code == 4
    assert 'the job has no host "h4"; it has this machine, h1, h2, h3' in ended.err


@pytest.mark.long
def test_one_host_alone_is_looked_at_together_with_this_machine(shared_place: Workplace) -> None:
    ended, findings = doctor(shared_place, "--host", "h2")
    assert ended.code == 0
    assert {finding["place"] for finding in findings} == {HERE, "h2", "links"}
    assert [f["subject"] for f in findings if f["place"] == "links"] == ["h2 -> this machine"]


@pytest.mark.long
def test_a_host_that_is_silent_and_one_that_rejects_are_told_apart(
    cluster: Cluster, place: Workplace
) -> None:
    write(place, LIGHT.replace('ssh = "h2"', 'ssh = "h2"\ndata = "10.99.1.77"\nbind = "10.99.1.2"'))
    rules = (
        "add table inet own; add chain inet own in { type filter hook input priority 0; }; "
        f"add rule inet own in tcp dport {PORT + 3} reject with tcp reset"
    )
    assert cluster.ssh("h3", "nft", shlex.quote(rules)).returncode == 0
    _, findings = doctor(place)
    dark, rejected = only(findings, "h1 -> h2"), only(findings, "h1 -> h3")
    assert "10.99.1.77" in dark["found"]
    assert dark["facts"]["kind"] in ("dark", "no route")
    assert "connection refused" in rejected["found"]
    assert f"nft insert rule inet TABLE CHAIN tcp dport {PORT + 3} accept" in rejected["fix"]


@pytest.mark.long
def test_ports_that_the_run_itself_has_are_no_fault_while_it_lives(
    cluster: Cluster, place: Workplace
) -> None:
    place.job(stop="{ steps = 100000000 }", servers=3, workers=1, more=LIGHT)
    place.start()
    ended, findings = doctor(place)
    assert wrong(findings) == []
    assert "is held by coordinator of clouds-" in only(findings, "coordinator", HERE)["found"]
    assert "is held by server-1 of clouds-" in only(findings, "server-1", "h2")["found"]
    assert ended.code == 0
    assert place.dlctl("stop").code == 0
    _, findings = doctor(place)
    assert "room" not in only(findings, "/dev/shm", "h2")["found"]
    assert "the shards here take about" in only(findings, "/dev/shm", "h2")["found"]


@pytest.mark.long
def test_interrupted_it_leaves_no_process_anywhere(cluster: Cluster, place: Workplace) -> None:
    command = place.begin("doctor", "job.toml")
    place.until("it asks h1", lambda: cluster.processes("h1"))
    os.kill(command.process.pid, signal.SIGINT)  # `enter` has become the command itself.
    ended = command.end(20)
    assert ended.code == 130
    place.until("nobody is left", lambda: not any(map(cluster.processes, cluster.names)))
