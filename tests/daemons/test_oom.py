"""Was it for want of memory? Asked of the real kernel where it has cgroups of version 1."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from limited_memory import limited_memory

from daemons.agent import oom
from daemons.agent.oom import MemoryGroup, OomWatch

LIMIT_BYTES = 64 * 2**20
GREEDY = "import sys; sys.stdin.readline(); x = bytearray(b'x' * (256 * 2**20))"


@pytest.fixture
def group() -> Iterator[Path]:
    with limited_memory(LIMIT_BYTES) as directory:
        yield directory


def greedy(group: Path) -> subprocess.Popen[bytes]:
    """A process within the group that asks for too much as soon as it gets a line."""
    process = subprocess.Popen([sys.executable, "-c", GREEDY], stdin=subprocess.PIPE)
    (group / "cgroup.procs").write_text(str(process.pid))
    return process


def eat(process: subprocess.Popen[bytes]) -> None:
    process.communicate(b"\n")
    assert process.returncode == -signal.SIGKILL


@pytest.mark.root
def test_a_process_that_outgrows_its_group_is_known_to_have_died_of_that(group: Path) -> None:
    watch, process = OomWatch(), greedy(group)
    watch.begin(process.pid)
    eat(process)
    assert watch.cause(process.pid) == "out of memory: limit 64 MiB"


@pytest.mark.root
def test_each_kill_that_was_counted_explains_one_death_only(group: Path) -> None:
    """One died for want of memory, and somebody kills the other one at the same time."""
    watch, hungry, shot = OomWatch(), greedy(group), greedy(group)
    for process in (hungry, shot):
        watch.begin(process.pid)
    eat(hungry)
    shot.kill()
    shot.communicate()
    assert watch.cause(hungry.pid) == "out of memory: limit 64 MiB"
    assert watch.cause(shot.pid) == ""


@pytest.mark.root
def test_what_happened_long_before_explains_nothing(group: Path) -> None:
    watch, hungry, shot = OomWatch(), greedy(group), greedy(group)
    watch.begin(shot.pid)
    eat(hungry)
    for _ in range(2):
        watch.look()
    shot.kill()
    shot.communicate()
    assert watch.cause(shot.pid) == ""


@pytest.mark.root
def test_a_process_that_is_moved_is_watched_where_it_is(group: Path) -> None:
    watch = OomWatch()
    process = subprocess.Popen([sys.executable, "-c", GREEDY], stdin=subprocess.PIPE)
    watch.begin(process.pid)
    (group / "cgroup.procs").write_text(str(process.pid))
    watch.look()
    eat(process)
    assert watch.cause(process.pid) == "out of memory: limit 64 MiB"
    watch.forget(process.pid)
    assert watch.cause(process.pid) == ""


@pytest.mark.root
def test_the_limit_may_be_that_of_a_group_further_out(group: Path) -> None:
    inner = group / "inner"
    (group / "memory.use_hierarchy").write_text("1")
    inner.mkdir()
    try:
        process = greedy(inner)
        found = oom.find(process.pid)
        assert found is not None
        assert found.directories[:2] == (inner, group)
        eat(process)
        assert (found.kills(), found.reached_limit_bytes()) == (1, LIMIT_BYTES)
    finally:
        inner.rmdir()


def test_a_process_that_was_only_killed_has_no_such_cause() -> None:
    watch = OomWatch()
    process = subprocess.Popen([sys.executable, "-c", GREEDY], stdin=subprocess.PIPE)
    watch.begin(process.pid)
    watch.look()
    process.kill()
    process.communicate()
    assert watch.cause(process.pid) == ""
    assert watch.cause(os.getpid()) == "", "nobody has asked to watch this one"
    assert oom.find(process.pid) is None


# ---------------------------------------------------------------- version 2, by its files


def write_v2(directory: Path, limit: str, oom_times: int, kills: int) -> Path:
    directory.mkdir()
    events = f"low 0\nhigh 0\nmax 311\noom {oom_times}\noom_kill {kills}\noom_group_kill 0\n"
    (directory / "memory.events").write_text(events)
    (directory / "memory.max").write_text(f"{limit}\n")
    return directory


def test_version_2_says_it_in_other_files(tmp_path: Path) -> None:
    outer = write_v2(tmp_path / "outer", "1073741824", oom_times=1, kills=1)
    inner = write_v2(outer / "inner", "max", oom_times=0, kills=1)
    group = MemoryGroup(2, (inner, outer, tmp_path))
    assert (group.kills(), group.reached_limit_bytes()) == (1, 2**30)


def test_a_limit_that_was_not_reached_is_not_named(tmp_path: Path) -> None:
    """The whole machine had no memory left."""
    own = write_v2(tmp_path / "own", "1073741824", oom_times=0, kills=1)
    group = MemoryGroup(2, (own, tmp_path))
    assert (group.kills(), group.reached_limit_bytes()) == (1, None)


def test_without_such_files_nothing_is_known(tmp_path: Path) -> None:
    assert MemoryGroup(1, (tmp_path,)).kills() is None
    assert MemoryGroup(2, (tmp_path,)).kills() is None
