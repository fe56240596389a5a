"""The hosts that other tests rely on: they are other machines, and can be broken one by one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from dlctl import __version__

from .cluster import Cluster, missing
from .waiting import until

pytestmark = pytest.mark.root

PORT = 7000
SILENCE_S = 0.2
MBIT_PER_S = 40.0
DELAY_MS = 30.0
LONG_SLEEP = "setsid sleep 600 < /dev/null > /dev/null 2>&1 &"
"""A daemon that outlives the command, or the session, that started it."""
KILLED = """
import json, sys
import psutil
from hosts.cluster import Cluster

with Cluster(count=2) as cluster:
    cluster.shape("h1", delay_ms=1)
    cluster.ssh("h1", sys.argv[1])
    cluster.run("sh", "-c", sys.argv[1])
    pids = [p.pid for p in psutil.Process().children(recursive=True)]
    pids += [p.pid for name in ("lab", "h1") for p in cluster.processes(name)]
    print(json.dumps([str(cluster.directory), pids]), flush=True)
    sys.stdin.read()
"""


def lives(pid: int) -> bool:
    """Also false of who is dead and was not yet waited for, by whoever is process 1 here."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@contextmanager
def connected(
    cluster: Cluster, one: str, other: str, port: int = 0
) -> Iterator[tuple[socket.socket, ...]]:
    """Both ends of a connection from `one` to `other`."""
    with closing(cluster.tcp_socket(other)) as server, closing(cluster.tcp_socket(one)) as client:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((cluster.address(other), port))
        server.listen()
        client.settimeout(5.0)
        client.connect(server.getsockname())
        with closing(server.accept()[0]) as accepted:
            accepted.settimeout(5.0)
            yield client, accepted


def mbit_per_s(cluster: Cluster, one: str, other: str, size_bytes: int) -> float:
    with connected(cluster, one, other) as (sender, receiver), ThreadPoolExecutor(1) as thread:
        began = time.monotonic()
        sent = thread.submit(sender.sendall, bytes(size_bytes))
        left = size_bytes
        while left:
            left -= len(receiver.recv(1 << 20))
        sent.result()
        return size_bytes * 8 / 1e6 / (time.monotonic() - began)


def round_trip_ms(one: socket.socket, other: socket.socket) -> float:
    """The quickest of some."""
    took = []
    for _ in range(5):
        began = time.monotonic()
        one.sendall(b"?")
        other.sendall(other.recv(1))
        one.recv(1)
        took.append(time.monotonic() - began)
    return min(took) * 1000


def hears(end: socket.socket) -> bytes | None:
    """What it gets in a short while; None: nothing, b"": the end of the connection."""
    end.settimeout(SILENCE_S)
    try:
        return end.recv(100)
    except TimeoutError:
        return None
    finally:
        end.settimeout(5.0)


# ---------------------------------------------------------------- other machines


def test_ssh_reaches_every_host_by_its_name_also_all_at_once(shared_cluster: Cluster) -> None:
    with ThreadPoolExecutor() as threads:
        answers = threads.map(lambda name: shared_cluster.ssh(name, "hostname"), ["h1", "h2", "h3"])
        assert [answer.stdout for answer in answers] == ["h1\n", "h2\n", "h3\n"]


def test_hosts_have_nothing_in_common_by_which_they_could_be_one(shared_cluster: Cluster) -> None:
    facts = "cat /etc/machine-id /proc/sys/kernel/random/boot_id; cut -d. -f1 /proc/uptime"
    found = [shared_cluster.ssh(name, facts).stdout.split() for name in ("h1", "h2")]
    own = [Path(path).read_text().strip() for path in ("/proc/sys/kernel/random/boot_id",)]
    for one, other in zip(*found, strict=True):
        assert one
        assert one != other
    assert not {*own} & {*found[0], *found[1]}
    if Path("/proc/self/ns/time").exists():
        assert abs(int(found[0][2]) - int(found[1][2])) > 10_000


def test_files_of_the_lab_are_not_on_a_host_and_the_other_way_round(
    shared_cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("secret")
    places = ["/tmp/seen", "/dev/shm/seen", "/root/seen", "/run/seen", "/var/tmp/seen"]
    line = f"cat {tmp_path}/key || touch {' '.join(places)} && id -u"
    ended = shared_cluster.ssh("h1", line)
    assert ended.stdout == "0\n"
    assert "No such file" in ended.stderr
    for place in places:
        assert (shared_cluster.files("h1") / place[1:]).exists()
        assert not Path(place).exists()
        assert not (shared_cluster.files("h2") / place[1:]).exists()


def test_every_host_has_this_python_and_dlctl_and_cannot_change_them(
    shared_cluster: Cluster,
) -> None:
    code = "import dlctl, daemons, msgpack; print(dlctl.__version__, dlctl.__path__[0])"
    ended = shared_cluster.ssh("h3", f"{shared_cluster.python} -B -c '{code}'")
    version, path = ended.stdout.split()
    assert version == __version__
    assert "Read-only" in shared_cluster.ssh("h3", f"touch {path}/new").stderr


def test_a_shared_directory_is_one_for_all(possible: None, tmp_path: Path) -> None:
    with Cluster(count=2, shared=[tmp_path]) as cluster:
        cluster.ssh("h1", f"echo from h1 > {tmp_path}/file")
        assert cluster.ssh("h2", f"cat {tmp_path}/file").stdout == "from h1\n"
        assert (tmp_path / "file").read_text() == "from h1\n"


@pytest.mark.parametrize("are_known", [True, False])
def test_names_of_hosts_are_known_to_all_or_only_to_ssh(possible: None, are_known: bool) -> None:
    with Cluster(count=2, are_names_known=are_known) as cluster:
        assert cluster.ssh("h2", "hostname").stdout == "h2\n"
        for look in (cluster.run("getent", "hosts", "h2"), cluster.ssh("h1", "getent", "hosts h2")):
            assert (look.returncode == 0) is are_known
            assert (cluster.address("h2") in look.stdout) is are_known


def test_keys_are_private_and_the_users_own_are_not_used(shared_cluster: Cluster) -> None:
    assert stat.S_IMODE(shared_cluster.directory.stat().st_mode) == 0o700
    for name in ("key", "h1", "h2", "h3"):
        assert stat.S_IMODE((shared_cluster.directory / name).stat().st_mode) == 0o600
    settings = shared_cluster.run("ssh", "-G", "h1").stdout.splitlines()
    assert f"identityfile {shared_cluster.directory}/key" in settings
    assert f"userknownhostsfile {shared_cluster.directory}/known_hosts" in settings
    assert "stricthostkeychecking true" in settings
    assert "SSH_AUTH_SOCK" not in shared_cluster.env


def test_a_command_in_the_lab_begins_in_the_current_directory(
    shared_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shared_cluster.run("pwd").stdout == f"{tmp_path}\n"
    assert shared_cluster.run("hostname").stdout == "lab\n"


def test_what_runs_and_listens_on_a_host_is_seen(shared_cluster: Cluster) -> None:
    assert [(port.address, port.port, port.process) for port in shared_cluster.listening("h1")] == [
        (shared_cluster.address("h1"), 22, "sshd")
    ]
    shared_cluster.ssh("h1", LONG_SLEEP)
    (sleeping,) = until(
        "it runs", lambda: [p for p in shared_cluster.processes("h1") if p.name() == "sleep"]
    )
    assert sleeping.cmdline() == ["sleep", "600"]
    assert not shared_cluster.processes("h2")
    # Nobody but the host's first process is left to notice its end.
    sleeping.kill()
    until("it is buried", lambda: not sleeping.is_running())


# ---------------------------------------------------------------- the network


def test_a_link_becomes_as_slow_as_asked_both_ways(shared_cluster: Cluster) -> None:
    assert mbit_per_s(shared_cluster, "lab", "h1", 20_000_000) > 5 * MBIT_PER_S
    shared_cluster.shape("h1", mbit_per_s=MBIT_PER_S)
    try:
        for one, other in (("lab", "h1"), ("h1", "lab"), ("h2", "h1")):
            rate = mbit_per_s(shared_cluster, one, other, 1_000_000)
            assert MBIT_PER_S / 2 < rate < 1.1 * MBIT_PER_S
        assert mbit_per_s(shared_cluster, "lab", "h2", 10_000_000) > 5 * MBIT_PER_S
    finally:
        shared_cluster.shape("h1")
    assert mbit_per_s(shared_cluster, "h1", "lab", 20_000_000) > 5 * MBIT_PER_S


def test_a_link_becomes_long_and_connections_live_on(shared_cluster: Cluster) -> None:
    with connected(shared_cluster, "lab", "h1") as (lab, host):
        assert round_trip_ms(lab, host) < DELAY_MS
        shared_cluster.shape("h1", mbit_per_s=MBIT_PER_S, delay_ms=DELAY_MS)
        try:
            assert 2 * DELAY_MS <= round_trip_ms(lab, host) < 4 * DELAY_MS
            assert mbit_per_s(shared_cluster, "h2", "h1", 1_000_000) < 1.1 * MBIT_PER_S
        finally:
            shared_cluster.shape("h1")
        assert round_trip_ms(lab, host) < DELAY_MS


@pytest.mark.parametrize("delay_ms", [0.0, 5.0])
def test_a_host_that_is_cut_off_is_silent_and_goes_on_when_that_heals(
    shared_cluster: Cluster, delay_ms: float
) -> None:
    shared_cluster.shape("h2", delay_ms=delay_ms)
    with connected(shared_cluster, "lab", "h2") as (lab, host):
        shared_cluster.cut("h2")
        try:
            lab.sendall(b"hello")
            host.sendall(b"hello")
            assert (hears(host), hears(lab)) == (None, None)
            look = [*shared_cluster.inside("h2"), "ip", "-br", "link", "show", "eth0"]
            assert "LOWER_UP" in subprocess.run(look, capture_output=True, text=True).stdout
        finally:
            shared_cluster.heal("h2")
            shared_cluster.shape("h2")
        assert (host.recv(5), lab.recv(5)) == (b"hello", b"hello")


def test_a_host_that_loses_its_power_says_nothing_and_has_nothing_left(cluster: Cluster) -> None:
    cluster.ssh("h2", LONG_SLEEP)
    pids = [process.pid for process in cluster.processes("h2")]
    code = f'import socket; socket.create_server(("", {PORT})).accept()[0].recv(1)'
    cluster.ssh("h2", f"setsid {cluster.python} -c '{code}' < /dev/null > /dev/null 2>&1 &")
    until("it listens", lambda: len(cluster.listening("h2")) == 2)
    with closing(cluster.tcp_socket("lab")) as lab:
        lab.connect((cluster.address("h2"), PORT))
        cluster.lose("h2")
        assert hears(lab) is None
    assert pids
    assert not any(lives(pid) for pid in pids)
    assert cluster.processes("h2") == []
    with pytest.raises(RuntimeError, match="lost"):
        cluster.listening("h2")
    with pytest.raises(RuntimeError, match="lost"):
        cluster.break_key("h2")
    assert cluster.ssh("h1", "hostname").stdout == "h1\n"


# ---------------------------------------------------------------- hosts that are set up wrongly


def test_a_host_that_does_not_know_our_key_lets_nobody_in(shared_cluster: Cluster) -> None:
    shared_cluster.break_key("h1")
    refused = shared_cluster.ssh("h1", "true")
    shared_cluster.mend_key("h1")
    assert refused.returncode == 255
    assert "Permission denied" in refused.stderr
    assert shared_cluster.ssh("h1", "true").returncode == 0


def test_a_firewall_swallows_new_connections_to_some_ports_only(shared_cluster: Cluster) -> None:
    with connected(shared_cluster, "lab", "h1", PORT) as (lab, host):
        shared_cluster.firewall("h1", [1, "6000-8000"])
        try:
            assert shared_cluster.ssh("h1", "hostname").stdout == "h1\n"
            lab.sendall(b"still here")
            assert host.recv(10) == b"still here"
            with closing(shared_cluster.tcp_socket("lab")) as late:
                late.settimeout(SILENCE_S)
                with pytest.raises(TimeoutError):
                    late.connect((shared_cluster.address("h1"), PORT))
        finally:
            shared_cluster.firewall("h1", [])
    with connected(shared_cluster, "lab", "h1", PORT):
        pass


def test_a_host_has_too_little_shared_memory_or_a_home_that_is_read_only(cluster: Cluster) -> None:
    cluster.small_shm("h1", 1 << 20)
    cluster.read_only_home("h2")
    for name, full, read_only in (("h1", True, False), ("h2", False, True)):
        stderr = cluster.ssh(name, "head -c 2000000 /dev/zero > /dev/shm/big; touch ~/new").stderr
        assert ("No space left" in stderr, "Read-only file system" in stderr) == (full, read_only)


def test_a_host_lacks_torch_or_has_another_dlctl(cluster: Cluster) -> None:
    cluster.hide_torch("h1")
    cluster.other_version("h2", "9.8.7")
    code = (
        "import importlib.metadata as m, importlib.util as u, dlctl\n"
        'print([d.name for d in m.distributions() if d.name == "torch"], end=" ")\n'
        'print(u.find_spec("torch") is not None, dlctl.__version__)'
    )
    outputs = [
        cluster.ssh(name, f"{cluster.python} -B -c '{code}'").stdout for name in cluster.names
    ]
    assert outputs[0] == f"[] False {__version__}\n"
    assert outputs[1] == "['torch'] True 9.8.7\n"
    assert outputs[2] == f"['torch'] True {__version__}\n"


def test_a_host_has_a_clock_that_is_wrong(cluster: Cluster) -> None:
    if not shutil.which("cc"):
        pytest.skip("no cc here")
    cluster.fake_clock("h1", -3600)
    cluster.fake_clock("h1", 86400)
    ahead_s = [int(cluster.ssh(name, "date +%s").stdout) - time.time() for name in ("h1", "h2")]
    assert ahead_s == pytest.approx([86400.0, 0.0], abs=30.0)


# ---------------------------------------------------------------- the end


def test_nothing_is_left_of_a_cluster(possible: None) -> None:
    before = (sorted(os.listdir("/sys/class/net")), Path("/proc/self/mountinfo").read_text())
    others = children()
    with Cluster(count=2) as cluster:
        cluster.ssh("h1", LONG_SLEEP)
        cluster.run("sh", "-c", LONG_SLEEP)
        cluster.shape("h2", mbit_per_s=1, delay_ms=1)
        until("both run", lambda: cluster.processes("lab") and cluster.processes("h1"))
        pids = {p.pid for name in ("lab", "h1") for p in cluster.processes(name)}
        pids |= children() - others
        assert len(pids) >= 10
    assert not [pid for pid in pids if lives(pid)]
    assert not cluster.directory.exists()
    after = (sorted(os.listdir("/sys/class/net")), Path("/proc/self/mountinfo").read_text())
    assert after == before


def test_nothing_is_left_when_the_test_is_killed(possible: None) -> None:
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])
    killed = subprocess.Popen(
        [sys.executable, "-c", KILLED, LONG_SLEEP],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert killed.stdin is not None
    assert killed.stdout is not None
    with killed.stdin, killed.stdout:
        directory, pids = json.loads(killed.stdout.readline())
        assert len(pids) >= 10
        assert all(lives(pid) for pid in pids)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    until("no process is left", lambda: not any(lives(pid) for pid in pids))
    until("no file is left", lambda: not Path(directory).exists())


def test_without_root_there_is_no_cluster_and_it_is_said_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert missing() == "not root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool, path: None if tool == "sshd" else tool)
    assert missing().startswith("not here: sshd (")
