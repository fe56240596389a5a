"""Facts and what they mean: every row of these tables is a machine with one thing to say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from dlctl.health import network, resources, software
from dlctl.health.findings import FAULT, OK, WARNING, Finding, by_place, duration_text
from dlctl.health.needs import HERE, HostNeed
from dlctl.job.config import Host, Job, JobFile, Network
from dlctl.util.units import short_size

MB, GB = 10**6, 10**9
HERE_FACTS: dict[str, Any] = {
    "host": "desk",
    "user": "ann",
    "python": "/venv/bin/python",
    "versions": {"dlctl": "1.2.3", "protocol": 4, "python": "3.11.7", "torch": "2.10.0"},
    "no_kernels": "",
    "directory": {"path": "/home/ann/d", "problem": "", "fix": "", "free_bytes": 100 * GB},
    "states": None,
    "runtime": {"path": "/run/user/9/dlctl", "problem": "", "fix": "", "free_bytes": GB},
    "shm": {"total_bytes": 16 * GB, "free_bytes": 16 * GB, "problem": ""},
    "open_files_max": 1024,
    "memory": {"total_bytes": 32 * GB, "available_bytes": 30 * GB},
    "cores": 16,
    "gpu": {"has_tool": True, "devices": ["H200, 570.1"], "problem": ""},
    "addresses": {"lo": ["127.0.0.1"], "eth0": ["10.0.0.2"]},
    "firewall": {"family": "ufw", "is_active": True, "words": "ufw is active"},
    "logout": {"kills": False, "removes_ipc": False},
    "torch": {"version": "2.10.0+cu128", "cuda": "12.8", "devices": 1},
}
NEED = HostNeed("gpu1", Host(ssh="gpu1"), ("server-0",), 4, 2, 0, "auto", 6, 100 * MB, True)
AT_HOME = NEED._replace(name=HERE, host=Host())
OTHER = NEED._replace(name="gpu2", host=Host(ssh="gpu2"))


def facts(**changed: Any) -> dict[str, Any]:
    return {**HERE_FACTS, **changed}


def versions(**changed: Any) -> dict[str, Any]:
    return facts(versions={**HERE_FACTS["versions"], **changed})


def folder(**changed: Any) -> dict[str, Any]:
    return {**HERE_FACTS["directory"], **changed}


def all_of(need: HostNeed, known: dict[str, Any]) -> dict[str, Finding]:
    found = [*software.findings(need, known, HERE_FACTS), *resources.findings(need, known)]
    return {finding.subject: finding for finding in found}


def marked(found: Iterable[Finding]) -> dict[str, str]:
    return {finding.subject: finding.mark for finding in found if finding.mark != OK}


def test_a_good_machine_has_nothing_but_good_marks_and_no_fixes() -> None:
    found = all_of(NEED, facts())
    assert marked(found.values()) == {}
    assert {finding.fix for finding in found.values()} == {""}
    assert set(found) == {
        "dlctl", "Python", "torch", "GPU", "files", "/dev/shm", "memory", "cores", "open files",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("known", "subject", "mark", "found", "fix"),
    [
        (
            versions(dlctl="9.8.7"),
            "dlctl",
            FAULT,
            "9.8.7 with protocol 4; this machine has 1.2.3",
            "1.2.3",
        ),
        (
            versions(protocol=5),
            "dlctl",
            FAULT,
            "protocol 5; this machine has 1.2.3 with protocol 4",
            "set",
        ),
        (versions(python="3.12.1"), "Python", WARNING, "3.12.1 at /venv/bin/python", "Python 3.11"),
        (
            facts(torch={"problem": "MemoryError"}),
            "torch",
            FAULT,
            "cannot be imported for /venv/bin/python (MemoryError); 4 workers here",
            "/venv/bin/python -c 'import torch' there shows more",
        ),
        (
            {**versions(torch=""), "torch": {"problem": "No module named 'torch'"}},
            "torch",
            FAULT,
            "is not installed for /venv/bin/python (No module named 'torch'); 4 workers here",
            "pip install torch\nor: workers = 0",
        ),
        (
            facts(torch={"version": "2.11.0", "cuda": "", "devices": 1}),
            "torch",
            WARNING,
            "2.11.0, without CUDA; this machine has 2.10.0+cu128",
            "install torch 2.10.0 there",
        ),
        (
            facts(torch={**HERE_FACTS["torch"], "uncompiled": 900, "place": "/venv/lib/torch"}),
            "bytecode",
            WARNING,
            "900 modules",
            "/venv/bin/python -m compileall -q /venv/lib/torch",
        ),
        (
            facts(torch={"version": "2.10.0", "cuda": "12.8", "devices": 0}),
            "GPU",
            WARNING,
            "H200, 570.1; but torch finds none",
            "CUDA",
        ),
        (
            facts(gpu={"has_tool": True, "devices": [], "problem": "driver mismatch"}),
            "GPU",
            WARNING,
            "nvidia-smi fails: driver mismatch",
            "reboot",
        ),
        (
            facts(directory=folder(problem="/home is on a file system that is read-only")),
            "files",
            FAULT,
            "no files can be stored in /home/ann/d: /home is on a file system that is read-only",
            "set dir of this host in [[hosts]]",
        ),
        (
            facts(directory=folder(problem="not private", fix="there: chmod 700 /home/ann/d")),
            "files",
            FAULT,
            "not private",
            "chmod 700",
        ),
        (facts(directory=folder(free_bytes=MB)), "files", FAULT, "1 MB free", "make room"),
        (facts(directory=folder(free_bytes=300 * MB)), "files", WARNING, "300 MB", "make room"),
        (
            facts(states=folder(path="/nvme", problem="it is not there")),
            "state_dir",
            FAULT,
            "no files can be stored in /nvme",
            "state_dir in [servers]",
        ),
        (
            facts(runtime=folder(problem="others can enter it", fix="chmod 700 it")),
            "sockets",
            FAULT,
            "others can enter it",
            "chmod 700",
        ),
        (
            facts(shm={"total_bytes": MB, "free_bytes": MB, "problem": ""}),
            "/dev/shm",
            WARNING,
            "1 MB free; the shards here take about 100 MB: what does not fit goes into",
            "mount -o remount,size=191M /dev/shm",
        ),
        (
            facts(
                shm={"total_bytes": 0, "free_bytes": 0, "problem": "it cannot be written to"},
                directory=folder(free_bytes=60 * MB),
            ),
            "/dev/shm",
            FAULT,
            "has no space for that, either",
            "make room",
        ),
        (
            facts(memory={"total_bytes": GB, "available_bytes": GB}),
            "memory",
            WARNING,
            "the workers and shards here take at least 1.78 GB",
            "fewer workers for this host",
        ),
        (facts(cores=4), "cores", WARNING, "4, for 4 workers and 1 server", "fewer workers"),
        (facts(open_files_max=64), "open files", FAULT, "up to 64 at once", "nofile"),
        (facts(open_files_max=150), "open files", WARNING, "this job may want 176", "nofile"),
        (
            facts(logout={"kills": True, "removes_ipc": True}),
            "logout",
            FAULT,
            "KillUserProcesses",
            "enable-linger ann",
        ),
        (
            facts(logout={"kills": False, "removes_ipc": True}),
            "logout",
            WARNING,
            "RemoveIPC",
            "enable-linger ann",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_fix(
    known: dict[str, Any], subject: str, mark: str, found: str, fix: str
) -> None:
    finding = all_of(NEED, known)[subject]
    assert finding.mark == mark
    assert found in finding.found
    assert fix in finding.fix


def test_a_host_without_workers_needs_no_torch_and_nobody_looks_for_it() -> None:
    idle = NEED._replace(workers=0)
    assert "torch" not in all_of(idle, facts(torch={}))
    without = all_of(idle, facts(torch={"problem": "No module named 'torch'"}))
    assert without["torch"].mark == WARNING


def test_a_gpu_that_the_job_insists_on_has_to_be_there() -> None:
    none = facts(
        gpu={"has_tool": False, "devices": [], "problem": ""},
        torch={"version": "2.10.0", "cuda": "", "devices": 0},
    )
    assert all_of(NEED, none)["GPU"].mark == OK
    assert all_of(NEED._replace(device="cuda"), none)["GPU"].mark == FAULT


def test_processes_that_load_data_need_shared_memory_of_their_own() -> None:
    small = facts(shm={"total_bytes": 64 * MB, "free_bytes": 64 * MB, "problem": ""})
    loading = NEED._replace(servers=(), shm_bytes=0, loader_processes=2)
    assert marked(all_of(loading, facts()).values()) == {}
    found = all_of(loading, small)["/dev/shm"]
    assert (found.mark, "8 loader" in found.found) == (WARNING, True)
    assert "mount -o remount,size=" in found.fix


def test_gpus_of_one_kind_are_counted() -> None:
    many = {"has_tool": True, "devices": ["H200, 570.1"] * 8, "problem": ""}
    assert all_of(NEED, facts(gpu=many))["GPU"].found == "8 x H200, 570.1"


@pytest.mark.parametrize("servers", [NEED.servers, ()])
def test_without_the_loops_in_c_dlctl_is_slower_and_that_is_said(servers: Any) -> None:
    need = NEED._replace(servers=servers)
    found = all_of(need, facts(no_kernels="it was not built"))["kernels"]
    assert found.mark == WARNING
    assert "it was not built" in found.found
    assert "--force-reinstall --no-cache-dir" in found.fix
    off = all_of(need, facts(no_kernels="DLCTL_KERNELS=off"))["kernels"]
    assert off.fix.startswith("unset DLCTL_KERNELS")
    assert "kernels" not in all_of(need, facts(no_kernels=""))


def test_shared_memory_is_looked_at_only_where_shards_will_be() -> None:
    assert "/dev/shm" not in all_of(NEED._replace(shm_bytes=0), facts())


@pytest.mark.parametrize(
    ("offset_s", "error_s", "mark"),
    [
        (0.0, 0.001, OK),
        (-1.9, 0.001, OK),
        (2.4, 0.5, OK),
        (2.6, 0.5, WARNING),
        (-59.0, 0.0, WARNING),
        (3600.0, 0.2, FAULT),
        (-3600.0, 0.2, FAULT),
    ],
)
def test_a_clock_is_judged_by_what_is_sure_of_it(
    offset_s: float, error_s: float, mark: str
) -> None:
    found = resources.clock(NEED, offset_s, error_s)
    assert found.mark == mark
    assert ("ahead of" in found.found) == (offset_s > 0)
    assert bool(found.fix) == (mark != OK)


def test_a_slow_login_is_told_with_a_way_to_find_out_why() -> None:
    assert resources.login(NEED, 0.4, "ssh", "try it").mark == OK
    slow = resources.login(NEED, 12.0, "ssh", "try it")
    assert (slow.mark, slow.subject, slow.fix) == (WARNING, "ssh", "try it")


# ---------------------------------------------------------------- ports and links

PLACE = {"name": "server-1", "address": "10.0.0.2", "port": 7002, "told": "10.0.0.2"}


def listens(
    place: dict[str, Any], need: HostNeed = NEED, run: dict[int, str] | None = None
) -> Finding:
    (found,) = network.listening(need, HERE_FACTS, [place], run or {})
    return found


def refused(kind: str, **more: Any) -> dict[str, Any]:
    place = {key: value for key, value in PLACE.items() if key != "told"}
    return {**place, "kind": kind, "words": "why", "owner": {}, **more}


def test_a_place_where_a_daemon_can_listen_is_told_with_what_others_are_told() -> None:
    assert listens(PLACE).found.endswith("10.0.0.2, port 7002")
    assert listens({**PLACE, "told": "gw"}).found.endswith(" gw")


def test_whoever_has_a_port_is_named() -> None:
    owner = {"pid": 4711, "command": ["nc", "-l", "a b"]}
    taken = listens(refused("taken", owner=owner))
    assert (taken.mark, taken.found) == (FAULT, "port 7002 is taken by pid 4711: nc -l 'a b'")
    assert "kill 4711" in taken.fix
    assert listens(refused("taken", owner=owner), run={4711: "server-1 of d-1"}).mark == OK
    hidden = listens(refused("taken"))
    assert hidden.found
    assert "sudo ss -ltnp 'sport = :7002'" in hidden.fix
    other = listens(refused("taken", owner={"pid": 5, "command": ["py", "-m", "daemons.server"]}))
    assert "dlctl ps" in other.fix


def test_an_address_of_no_interface_is_named_with_those_that_there_are() -> None:
    found = listens(refused("not ours"))
    assert (
        found.found == "10.0.0.2 is not an address of this host; it has lo 127.0.0.1; eth0 10.0.0.2"
    )
    assert "[[hosts]]" in found.fix
    own = listens(refused("not ours", name="coordinator"), AT_HOME)
    assert "[network]" in own.fix
    assert "root" in listens(refused("not permitted")).fix


def test_a_link_is_told_with_its_round_trip_and_both_rates() -> None:
    reached = {"round_trip_s": 0.00021, "up_bytes_per_s": 118e6, "down_bytes_per_s": 11.7e6}
    found = network.link(NEED, OTHER, HERE_FACTS, PLACE, reached, True)
    assert (found.place, found.subject, found.mark) == ("links", "gpu1 -> gpu2", OK)
    assert found.found == "server-1: round trip 0.21 ms, 118 MB/s there, 11.7 MB/s back"
    assert found.facts["port"] == 7002


@pytest.mark.parametrize(
    ("kind", "found", "fix"),
    [
        ("refused", "connection refused, although a probe listens", "ufw allow 7002/tcp"),
        ("silent", "a firewall drops packets to this port", "ufw allow 7002/tcp"),
        ("dark", "the address is wrong, or a firewall drops all", "correct data of gpu2"),
        ("no route", "no route", "ip route get 10.0.0.2"),
        ("unknown name", "gpu1 cannot resolve this name", "an IP address"),
        ("stranger", "another process answers", "leads to another machine"),
    ],
)
def test_every_way_not_to_be_reached_has_words_of_its_own(kind: str, found: str, fix: str) -> None:
    finding = network.link(NEED, OTHER, HERE_FACTS, PLACE, {"kind": kind, "words": "w"}, True)
    assert finding.mark == FAULT
    assert found in finding.found
    assert fix in finding.fix


def test_without_a_configured_port_there_is_none_that_could_be_opened() -> None:
    finding = network.link(NEED, OTHER, HERE_FACTS, PLACE, {"kind": "silent", "words": "w"}, False)
    assert finding.fix.startswith("set port")


def test_a_link_that_could_not_be_measured_any_more_is_not_called_bad() -> None:
    finding = network.not_reached(NEED, AT_HOME)
    assert (finding.mark, finding.fix) == (WARNING, "dlctl doctor JOBFILE --host gpu1")


def test_connections_without_keys_are_noticed() -> None:
    job = JobFile(job=Job(name="d", task="t.py:task"))
    assert network.keys(job, HERE) is None
    tcp = JobFile(job=job.job, network=Network(transport="tcp"))
    assert network.keys(tcp, HERE).mark == OK  # type: ignore[union-attr]
    bare = JobFile(job=job.job, network=Network(transport="tcp", encryption="none"))
    assert network.keys(bare, HERE).mark == WARNING  # type: ignore[union-attr]


def test_sizes_and_times_are_short_and_places_keep_their_order() -> None:
    sizes = {7: "7 B", 1500: "1.5 kB", 312e6: "312 MB", 999.9e6: "1 GB", 1.6e9: "1.6 GB"}
    assert {size: short_size(size) for size in sizes} == sizes
    assert [duration_text(s) for s in (0.000213, 41.0, 3600.1)] == ["0.21 ms", "41 s", "3600.1 s"]
    rows = [Finding(place, "s", OK, "f") for place in ("b", "a", "b")]
    assert {place: len(group) for place, group in by_place(rows).items()} == {"b": 2, "a": 1}
    assert list(by_place(rows)) == ["b", "a"]


def test_of_many_open_runs_a_few_are_named() -> None:
    modes = {f"/runs/open-{number:04}": "0755" for number in range(10)}
    found = resources.open_runs(AT_HOME, modes)
    assert (found.mark, found.facts) == (WARNING, {"open": 10})
    assert found.found.endswith("open-0007 (mode 0755) and 2 more")
    assert found.fix.count("/runs/open-") == 8
    assert found.fix.split("\n")[-1].startswith("dlctl doctor")
