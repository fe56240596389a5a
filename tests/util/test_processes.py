"""Which process is meant is told by its pid and its start, and no clock has a say in that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from process_identity import ME, OF_ANOTHER_BOOT, identity

from dlctl.runs.snapshot import load
from dlctl.util import processes

SLEEPER = "import signal; print(flush=True); signal.pause()"
CONFUSING = "open('/proc/self/comm', 'w').write('a) Z 1 (b')"
JUMPS_S = (3600, -3600, 86400)


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen]:
    """A Python that has come to its first line of output; it ends with the block."""
    words = [sys.executable, "-c", *arguments]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            yield process
        finally:
            process.kill()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    with started(SLEEPER) as process:
        yield process


@pytest.mark.parametrize("jump_s", JUMPS_S)
def test_when_the_clock_is_set_the_living_stay_alive(jump_s, sleeper, monkeypatch, run_directory):
    """The kernel tells the time of its start anew then, and with it that of all processes."""
    row = {"name": "server-0", **identity(sleeper.pid)}
    run = run_directory().run(state="running", **identity(sleeper.pid))
    before, born_at = psutil.boot_time(), psutil.Process(sleeper.pid).create_time()
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: before + jump_s)
    moved_s = psutil.Process(sleeper.pid).create_time() - born_at
    assert moved_s == pytest.approx(jump_s), "otherwise this shows nothing"

    assert identity(sleeper.pid)["pid_start"] == row["pid_start"]
    assert processes.living([row]) == [row]
    assert 0.0 <= processes.age_s(row["pid_start"]) < 60.0
    assert (load(run.path).state, load(run.path).is_live) == ("running", True)
    assert processes.end([row], grace_s=5.0) == (["server-0"], [])
    assert sleeper.wait() == -signal.SIGTERM


def test_the_memory_of_a_process_is_what_the_kernel_says_of_it():
    pid, start = os.getpid(), processes.start_of(os.getpid())
    before = processes.rss_bytes(pid, start)
    held = bytearray(os.urandom(50_000_000))
    grown = processes.rss_bytes(pid, start) - before
    assert 40_000_000 < grown < 70_000_000, len(held)
    assert processes.rss_bytes(pid, "another:1") is None


def test_a_command_name_cannot_confuse():
    with started(f"{CONFUSING}; {SLEEPER}") as process:
        assert Path(f"/proc/{process.pid}/comm").read_text() == "a) Z 1 (b\n"
        start = identity(process.pid)["pid_start"]
        assert processes.is_alive(process.pid, start)
        began_s = int(start.partition(":")[2]) / os.sysconf("SC_CLK_TCK")
        told_s = psutil.Process(process.pid).create_time() - psutil.boot_time()
        assert began_s == pytest.approx(told_s)


def test_somebody_else_with_the_same_pid_is_neither_found_nor_touched(sleeper):
    later = identity(sleeper.pid)["pid_start"] + "0"
    for start in (OF_ANOTHER_BOOT, later, "", "what?", None, 1750000000.0):
        assert not processes.is_alive(sleeper.pid, start)
        assert processes.hold(sleeper.pid, start) is None
        assert not processes.send_signal(sleeper.pid, start, signal.SIGKILL)
        assert processes.command_line(sleeper.pid, start) == []
    assert sleeper.poll() is None


@pytest.mark.parametrize("pid", [None, "1", 1.0, True, 0, -1, 2**22 + 1])
def test_what_is_no_pid_is_nobodys(pid):
    assert not processes.is_alive(pid, ME["pid_start"])
    assert processes.hold(pid, ME["pid_start"]) is None


def test_who_is_held_is_reached_and_nobody_else(sleeper):
    pidfd = processes.hold(*identity(sleeper.pid).values())
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    assert sleeper.wait() == -signal.SIGKILL


def test_one_that_has_ended_is_gone_although_its_end_is_not_collected(sleeper):
    me = identity(sleeper.pid)
    sleeper.kill()
    sleeper.stdout.read()
    assert processes.wait([me], timeout_s=5.0) == []
    assert processes.start_of(sleeper.pid) == me["pid_start"]
    assert processes.hold(me["pid"], me["pid_start"]) is None
    sleeper.wait()
    assert processes.start_of(sleeper.pid) is None


def test_the_age_of_a_process_is_known_unless_it_is_of_another_boot(sleeper):
    mine, childs = (
        processes.age_s(ME["pid_start"]),
        processes.age_s(identity(sleeper.pid)["pid_start"]),
    )
    assert mine > childs >= 0.0
    assert [processes.age_s(start) for start in (OF_ANOTHER_BOOT, None, 5.0, "", ":")] == [None] * 5


def test_the_command_line_is_as_it_was_given():
    words = [SLEEPER, "", "zwölf", "a b"]
    with started(*words) as process:
        found = processes.command_line(*identity(process.pid).values())
    assert found == [sys.executable, "-c", *words]


HIDDEN = """
import os, subprocess, sys
from pathlib import Path
from dlctl.util import processes
from dlctl.launch import local
sleeper = subprocess.Popen(["sleep", "60"])
row = {"name": "worker-0", "pid": sleeper.pid, "pid_start": processes.start_of(sleeper.pid)}
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    Path(f"/proc/{sleeper.pid}/stat").read_bytes()
    sys.exit("nothing is hidden")
except PermissionError:
    pass
print(processes.start_of(sleeper.pid), processes.living([row]), processes.end([row], 0.0))
print(processes.command_line(row["pid"], row["pid_start"]), list(local.living(Path("/"))))
print(processes.is_alive(os.getpid(), processes.start_of(os.getpid())))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount /proc anew")
def test_where_processes_of_others_are_hidden_they_are_none_of_ours():
    script = 'mount -t proc -o hidepid=1 proc /proc && exec "$@"'
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script, "sh"]
    command = [*words, sys.executable, "-c", HIDDEN]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["None [] ([], [])", "[] []", "True"]
