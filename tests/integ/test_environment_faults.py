"""Ports, disks, directories and impatient people: what is around a job may be wrong, too."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import zmq
from workplace import ENDLESS, SLOW_S, Workplace

from dlctl import kernels
from dlctl.launch import local
from dlctl.runs import paths
from dlctl.wire import codec
from dlctl.wire.messages import Request

ROOT = Path(__file__).parents[2]

# ---------------------------------------------------------------- an installation


def test_a_damaged_library_is_named_by_server_and_doctor_and_numpy_computes(
    place: Workplace,
) -> None:
    own = place.path / "own" / "dlctl"
    shutil.copytree(ROOT / "dlctl", own, ignore=shutil.ignore_patterns("__pycache__"))
    library, record = (own / "kernels" / path.name for path in (kernels.LIBRARY, kernels.RECORD))
    library.write_bytes(b"half of it")
    record.write_text(json.dumps({"library": "of all of it", "source": ""}))
    place.env["PYTHONPATH"] = os.pathsep.join([str(own.parent), place.env["PYTHONPATH"]])
    place.env["PYTHONNOUSERSITE"] = "1"  # So that none is forked from a process with another dlctl.
    place.job()
    assert place.dlctl("run", "job.toml").code == 0
    said = place.dlctl("logs", "server-0").out
    assert said.count("numpy computes updates, C would be faster: the library is damaged") == 1
    assert place.dlctl("doctor", "job.toml").out.count("the library is damaged") == 1
    place.nothing_left()


# ---------------------------------------------------------------- ports


def test_a_port_that_is_taken_is_named_with_its_holder(place: Workplace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        place.job(more=f'[network]\ntransport = "tcp"\nport = {port}\n')
        ended = place.dlctl("start", "job.toml")
    assert ended.code == 7
    assert f"tcp://127.0.0.1:{port}: {os.strerror(errno.EADDRINUSE)}" in ended.err
    assert f"pid {os.getpid()}" in ended.err
    assert "[network]" in ended.err
    place.nothing_left()


@pytest.mark.long
def test_only_coordinator_and_servers_listen_on_loopback_only_and_nobody_gets_in_without_a_key(
    place: Workplace,
) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS, servers=2, more='[network]\ntransport = "tcp"\n')
    place.start()
    place.until_step(5)
    listening = {
        process.pid: [c.laddr for c in process.net_connections() if c.status == "LISTEN"]
        for process in place.processes()
    }
    owners = {place.pid(name) for name in ("coordinator", "server-0", "server-1")}
    assert {pid for pid, there in listening.items() if there} == owners
    addresses = [address for there in listening.values() for address in there]
    assert [address.ip for address in addresses] == ["127.0.0.1"] * 3
    context, poller = zmq.Context(), zmq.Poller()
    try:
        for address in addresses:
            for has_key in (False, True):
                dealer = context.socket(zmq.DEALER)
                if has_key:  # One of its own; and the server's is not known to strangers.
                    dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
                    dealer.curve_serverkey = zmq.curve_keypair()[0]
                dealer.connect(f"tcp://127.0.0.1:{address.port}")
                with suppress(zmq.Again):  # It was refused for good before it could say it.
                    words = codec.encode(Request(1, "stop", {"kill": True}))
                    dealer.send_multipart(words, zmq.NOBLOCK)
                poller.register(dealer, zmq.POLLIN)
        step = place.run()["step"]
        place.until_step(step + 20)
        assert not poller.poll(0), "nobody has answered"
    finally:
        context.destroy(linger=0)
    assert place.run()["state"] == "running"
    assert place.dlctl("stop").code == 0
    place.nothing_left()


@pytest.mark.long
def test_a_server_whose_port_is_taken_fails_the_start_in_the_same_way(place: Workplace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        place.job(more=f'[network]\ntransport = "tcp"\nport = {port - 1}\n')
        ended = place.dlctl("start", "job.toml")
    assert ended.code == 7
    headline = next(line for line in ended.err.splitlines() if line.startswith("error: "))
    assert f"tcp://127.0.0.1:{port}: " in headline
    assert f"pid {os.getpid()}" in headline
    assert "[network]" in headline
    assert ended.err.count(os.strerror(errno.EADDRINUSE)) == 1
    assert place.run()["reason"] in headline
    assert place.daemon("worker-0")["state"] == "stopped", "it has done nothing wrong"
    place.nothing_left()


# ---------------------------------------------------------------- directories and disks


def test_a_run_directory_that_cannot_be_made_is_said_at_once(place: Workplace) -> None:
    (place.path / "file").write_text("")
    job = place.path / place.job()
    job.write_text(job.read_text().replace("[algorithm]", 'run_dir = "file/runs"\n[algorithm]'))
    ended = place.dlctl("start", "job.toml")
    assert ended.code == 1
    assert os.strerror(errno.ENOTDIR) in ended.err
    assert "run_dir" in ended.err
    assert not place.processes()
    assert not any((place.path / "state").rglob("clouds-*"))


@contextmanager
def _small_disk(directory: Path, size: str, files: int = 0) -> Iterator[None]:
    """A file system of its own at `directory`; files: their largest number, if it has one."""
    directory.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None or os.geteuid() != 0:
        pytest.skip("only root can make a small disk")
    made = subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={size},mode=0755,nr_inodes={files}", "dlctl-test",
         str(directory)],
        capture_output=True, text=True,
    )  # fmt: skip
    if made.returncode != 0:
        pytest.skip(f"no tmpfs here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run([umount, "-l", str(directory)], check=True)


def _fill(directory: Path) -> Path:
    """A file that takes all room there is."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 65536):
                continue
        except OSError:
            return filler
    return filler


@pytest.mark.root
def test_a_start_on_a_full_disk_leaves_nothing(place: Workplace) -> None:
    runs = place.path / "runs"
    with _small_disk(runs, "256k"):
        filler = _fill(runs)
        place.job()
        ended = place.dlctl("start", "job.toml")
        assert ended.code == 1
        assert "No space left on device" in ended.err or "disk is full" in ended.err
        assert f"df -h {runs}" in ended.err
        assert list(runs.iterdir()) == [filler]
        assert not place.processes()


@pytest.mark.root
@pytest.mark.long
def test_training_goes_on_while_the_disk_is_full_and_saves_when_there_is_room(
    place: Workplace,
) -> None:
    runs = place.path / "runs"
    with _small_disk(runs, "4m"):
        place.task(pause_s=SLOW_S)
        seen = place.count_samples()
        place.job(stop=ENDLESS)
        place.start()
        place.until_step(5)
        assert place.dlctl("checkpoint").code == 0
        good = place.until("saved", lambda: place.run().get("checkpoint"))

        filler = _fill(runs)
        ended = place.dlctl("checkpoint")
        assert ended.code == 1
        assert os.strerror(errno.ENOSPC) in ended.err
        assert "next: df -h runs\n" in place.dlctl("status").out
        reason = "coordinator: cannot write the run's database: runs has "
        place.until("nobody takes it for silent", lambda: reason in place.dlctl("why").out)
        status = place.dlctl("status").out
        assert f"! {reason}" in status
        assert "  running  " in status.splitlines()[0]
        log = place.dlctl("logs", "--failed").out
        assert reason.partition(": ")[2] in log
        assert "kill" not in status + log
        before = seen().total()
        place.until("training goes on", lambda: seen().total() > before + 500)
        assert Path(good["path"]).is_dir()

        filler.unlink()
        place.until("a checkpoint again", lambda: place.dlctl("checkpoint").code == 0)
        status = place.dlctl("status").out
        assert "running" in status.splitlines()[0]
        assert place.dlctl("checkpoint", "verify").code == 0
        assert place.dlctl("stop").code == 0
        place.nothing_left()


@pytest.mark.long
@pytest.mark.root
def test_a_server_without_room_for_its_log_is_started_when_there_is_room(place: Workplace) -> None:
    runs = place.path / "runs"
    with _small_disk(runs, "16m", files=200):
        place.task(pause_s=SLOW_S)
        place.job(stop=ENDLESS)
        place.start()
        place.until_step(5)
        fillers = []
        with suppress(OSError):
            for number in range(200):
                fillers.append(runs / f"filler-{number}")
                fillers[-1].touch()
        os.kill(place.pid("server-0"), signal.SIGKILL)
        reason = "server-0 ended: not started: no space left for its log"
        place.until("it says why", lambda: reason in place.events("exit"))
        for filler in fillers[:-1]:
            filler.unlink()
        place.until("it is back", lambda: place.daemon("server-0")["state"] == "running")
        place.until_step(place.run()["step"] + 5)
        assert place.dlctl("stop").code == 0
        place.nothing_left()


@pytest.mark.root
@pytest.mark.long
def test_a_stop_while_a_server_waits_for_room_ends_and_says_what_to_do(place: Workplace) -> None:
    runs = place.path / "runs"
    with _small_disk(runs, "8m"):
        place.task(pause_s=SLOW_S)
        place.job(stop=ENDLESS, more_servers='durability = "disk"')
        place.start()
        place.until_step(20)
        filler = _fill(runs)
        os.kill(place.pid("server-0"), signal.SIGKILL)
        ended = place.dlctl("stop", "--grace", "2s", timeout_s=90.0)
        assert ended.code == 1
        assert "and that could not be recorded: runs has " in ended.err
        next_steps = ["df -h runs", "free space there, then", "dlctl recover -j "]
        assert [word for word in next_steps if word not in ended.err] == []
        assert not place.processes()
        assert "runs has " in place.dlctl("status").out
        filler.unlink()
        assert place.dlctl("recover").code == 0
        place.until_step(30)
        assert place.dlctl("stop").code == 0
        place.nothing_left()


# ---------------------------------------------------------------- impatient people


@pytest.mark.long
@pytest.mark.parametrize("after", ["the directory", "the daemons"])
def test_a_start_that_is_killed_leaves_a_whole_run_or_none(place: Workplace, after: str) -> None:
    reached = {
        # Not only the empty directory: whose that is, nobody could tell.
        "the directory": lambda: [f for d in place.path.glob("runs/*") for f in d.iterdir()],
        "the daemons": lambda: place.daemon("worker-0").get("pid"),
    }[after]
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS)
    start = place.begin("start", "job.toml")
    place.until(f"{after} is there", reached)
    start.process.send_signal(signal.SIGKILL)
    start.end()
    again = place.dlctl("start", "job.toml")
    assert again.code == 0, again.err
    assert place.run()["state"] == "running"
    assert len(place.processes()) == 5, "one run, not two"
    unfinished = list(place.path.glob("runs/*/.dlctl-unfinished"))
    assert len(list(place.path.glob("runs/*"))) == 1 + len(unfinished)
    for marker in unfinished:
        shutil.rmtree(marker.parent)  # Half a file may be there, which nobody uses.
    assert place.dlctl("stop").code == 0
    place.nothing_left()


@pytest.mark.long
def test_of_six_starts_at_once_one_starts_it(place: Workplace) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS)
    starts = [place.begin("start", "--no-wait", "job.toml") for _ in range(6)]
    ended = [start.end() for start in starts]
    assert [e.code for e in ended] == [0] * 6, [e.err for e in ended]
    assert (
        sum("is starting in the background" in e.err and "already" not in e.err for e in ended) == 1
    )
    assert len(list((place.path / "runs").iterdir())) == 1
    assert place.dlctl("wait", "--for", "ready").code == 0
    assert place.dlctl("stop").code == 0
    place.nothing_left()


@pytest.mark.long
def test_a_coordinator_that_is_started_beside_the_one_at_work_ends_and_the_run_goes_on(
    place: Workplace,
) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS)
    directory, first = place.start(), place.pid("coordinator")
    second = local.start(directory, "coordinator", "coordinator", 99, "")
    place.until("the second one ends", lambda: second.poll() is not None)
    assert second.returncode == 1
    assert (
        "another coordinator has this run"
        in paths.log_path(directory, "coordinator", 99).read_text()
    )
    place.until_step(place.run()["step"] + 10)
    assert (place.run()["state"], place.pid("coordinator")) == ("running", first)
    assert place.dlctl("stop").code == 0
    place.nothing_left()


# ---------------------------------------------------------------- a poor environment


@pytest.mark.long
def test_with_64_file_descriptors_a_run_starts_trains_and_stops(place: Workplace) -> None:
    prlimit = shutil.which("prlimit")
    if prlimit is None:
        pytest.skip("prlimit is not here")
    place.enter = [prlimit, "--nofile=64:64"]
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS, more='[network]\ntransport = "tcp"\n')
    place.start()
    place.until_step(5)
    assert place.dlctl("stop").code == 0
    place.nothing_left()
