"""The files of a shard are removed under a living server, as a logout may do it."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept_states import adagrad, dense, plain, snapshot, spec_of
from test_server_process import SIZE, MakeRun, make_run

from daemons.server import disklog
from daemons.server.storages import choose_storages
from daemons.server.watching import Watch
from dlctl.errors import DlctlError
from dlctl.job.config import Servers
from dlctl.runs import kept_shards
from dlctl.shards.base import Shard, no_point
from dlctl.shards.journaled import Journaled
from dlctl.wire import messages as m
from dlctl.wire.messages import APPLIED

__all__ = ["make_run"]

SPEC = spec_of(adagrad(), 1000)
SHARED, ON_DISK = "fast", "state"


class Kept:
    """A shard in files, the chore that looks after them, and a shard that nothing happens to."""

    def __init__(self, run: Path, durability: str) -> None:
        self.run = run
        self.servers = Servers(durability=durability)  # type: ignore[arg-type]
        self.storages: Any = choose_storages(run, self.servers, no_point)
        self.shard = Shard(adagrad(), self.storages.create(SPEC))
        self.model = plain(adagrad(), SPEC)
        self.watch = Watch(self.storages, run, lambda: None)

    def push(self, number: int) -> None:
        for shard in (self.shard, self.model):
            shard.apply(dense(number, SPEC.size))
            shard.commit({"number": number})

    def place(self) -> Path:
        (kept,) = kept_shards.kept(self.run, self.servers)
        assert kept.in_use
        return kept.path.parent

    def die(self) -> None:
        """As a kill -9 does it: the locks are gone, and nothing else happens."""
        if isinstance(self.storages, disklog.DiskLog):
            self.storages.close()
        else:
            self.storages._close()

    def found(self) -> tuple[Any, Any]:
        """What the next server finds."""
        storages = choose_storages(self.run, self.servers, no_point)
        shard = Shard(adagrad(), storages.reopen(SPEC))
        return shard, shard.resume()


MakeKept = Callable[[str], Kept]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeKept:
    """Shards whose preferred place is a directory of the test."""
    run = tmp_path / "run-1"
    run.mkdir()
    monkeypatch.setattr(kept_shards, "shared_memory", lambda: tmp_path / SHARED)
    monkeypatch.setattr("daemons.server.files.LOCK_S", 0.1)
    return lambda durability: Kept(run, durability)


def removals(kept: Kept) -> dict[str, Callable[[], None]]:
    place = kept.place()
    ways: dict[str, Callable[[], None]] = {"directory": lambda: shutil.rmtree(place)}
    for path in place.iterdir():
        kind = path.name.partition(".")[2].partition("-")[0]
        ways[kind] = path.unlink
    return ways


@pytest.mark.parametrize(
    ("durability", "what"),
    [
        ("process", "state"), ("process", "directory"), ("disk", "base"), ("disk", "journal"),
        ("disk", "lock"), ("disk", "directory"),
    ],
)  # fmt: skip
def test_what_was_removed_is_put_back_and_the_death_of_the_server_loses_nothing(
    make: MakeKept, caplog: pytest.LogCaptureFixture, durability: str, what: str
) -> None:
    kept = make(durability)
    for number in range(3):
        kept.push(number)
    place = kept.place()
    removals(kept)[what]()
    with caplog.at_level(logging.WARNING, "dlctl"):
        kept.watch()
    (line,) = caplog.messages
    assert "RemoveIPC" in line
    assert "loginctl" in line
    assert str(place) in line
    assert kept.place() == place
    kept.push(3)
    kept.watch()
    kept.die()
    again, meta = kept.found()
    assert snapshot(again) == snapshot(kept.model)
    assert meta == {"number": 3}
    assert len(caplog.messages) == 1


def test_a_state_that_is_removed_again_is_put_back_again(make: MakeKept) -> None:
    kept = make("process")
    kept.push(0)
    place = kept.place()
    for number in range(1, 4):
        shutil.rmtree(kept.place())
        kept.watch()
        kept.push(number)
        assert kept.place() == place
    kept.die()
    again, meta = kept.found()
    assert (snapshot(again), meta) == (snapshot(kept.model), {"number": 3})


@pytest.mark.parametrize("durability", ["process", "disk"])
def test_if_it_cannot_be_put_back_that_is_said_once_and_tried_again(
    make: MakeKept, caplog: pytest.LogCaptureFixture, durability: str
) -> None:
    kept = make(durability)
    kept.push(0)
    in_the_way = list(kept_shards.places(kept.run, kept.servers))
    shutil.rmtree(kept.place())
    for place in in_the_way:
        place.parent.mkdir(exist_ok=True)
        place.touch()
    for number in (1, 2):
        kept.watch()
        if durability == "process":
            kept.push(number)
    (line,) = caplog.messages
    assert "removed" in line
    for place in in_the_way:
        place.unlink()
    kept.watch()
    assert "is in " in caplog.messages[-1]
    kept.push(3)
    kept.die()
    assert snapshot(kept.found()[0]) == snapshot(kept.model)


def fail_once(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """The next write, or the next sync of a directory or of a journal, is refused by the disk."""
    name = "write" if at == "write" else "fsync"
    real, left = getattr(os, name), [1]

    def fails(descriptor: int, *rest: Any) -> Any:
        place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        is_it = {
            "write": "shard-" in place.name,
            "directory": place.is_dir(),
            "journal": "journal-" in place.name,
        }
        if left[0] and is_it[at]:
            left[0] -= 1
            if at == "write":
                real(descriptor, rest[0][:7])  # as much as there was room for
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, *rest)

    monkeypatch.setattr(disklog.os, name, fails)


@pytest.mark.parametrize("at", ["write", "directory", "journal"])
@pytest.mark.parametrize("then", ["push", "push, push", "close", "watch", "nothing"])
def test_a_log_that_could_not_be_put_back_at_first_loses_no_push(
    make: MakeKept,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    at: str,
    then: str,
) -> None:
    """All files are there again after the first attempt, so that there need not be a second one."""
    monkeypatch.setattr(Journaled, "_journal_bytes_max", lambda self: 10**6)  # no base by itself
    kept = make("disk")
    for number in range(3):
        kept.push(number)
    removals(kept)["lock"]()
    fail_once(monkeypatch, at)
    kept.watch()
    assert "restored" in caplog.messages[-1]
    for _ in range(then.count("push")):
        number += 1
        kept.push(number)
    if then == "close":
        kept.shard.storage.close()
    if then == "watch":
        kept.watch()
    kept.die()
    again, meta = kept.found()
    assert (snapshot(again), meta) == (snapshot(kept.model), {"number": number})


def test_a_log_that_could_not_be_put_back_and_is_not_there_is_put_back_later(
    make: MakeKept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = make("disk")
    kept.push(0)
    shutil.rmtree(kept.place())
    fail_once(monkeypatch, "write")
    kept.watch()
    assert "restored" in caplog.messages[-1]
    kept.watch()
    assert "lost" in caplog.messages[-1]
    kept.die()
    assert snapshot(kept.found()[0]) == snapshot(kept.model)


def test_files_that_a_commit_is_replacing_are_not_taken_for_lost(
    make: MakeKept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Between the journal of a new base and its name."""
    kept = make("disk")
    kept.push(0)
    (base,) = kept.place().glob("*.base-*")
    elsewhere = base.rename(base.with_suffix(".tmp"))
    watch = Watch(kept.storages, kept.run, lambda: elsewhere.rename(base) and None)
    watch()
    assert caplog.messages == []
    assert [*kept.place().glob("*.base-*")] == [base]


def test_after_an_error_of_the_log_nothing_is_acknowledged_by_this_server(
    make: MakeKept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if somebody catches the error and goes on: behind half a record none can be read."""
    kept = make("disk")
    kept.push(0)
    wanted = snapshot(kept.model)
    fail_once(monkeypatch, "write")
    for why in ("No space left", "an earlier write has failed", "an earlier write has failed"):
        with pytest.raises(DlctlError, match=why):
            kept.push(1)
    kept.die()
    again, meta = kept.found()
    assert (snapshot(again), meta) == (wanted, {"number": 0})


def test_after_an_error_of_the_log_an_end_in_order_writes_nothing_behind_half_a_record(
    make: MakeKept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = make("disk")
    kept.push(0)
    fail_once(monkeypatch, "write")
    with pytest.raises(DlctlError, match=os.strerror(errno.ENOSPC)):
        kept.shard.commit({"number": 1})
    kept.shard.storage.close()
    kept.die()
    again, meta = kept.found()
    assert (snapshot(again), meta) == (snapshot(kept.model), {"number": 0})


@pytest.mark.parametrize(("durability", "name"), [("process", "state"), ("disk", "lock")])
def test_the_state_of_a_server_that_has_replaced_this_one_is_not_touched(
    make: MakeKept, caplog: pytest.LogCaptureFixture, durability: str, name: str
) -> None:
    kept = make(durability)
    kept.push(0)
    place = kept.place()
    shutil.rmtree(place)
    successor = Kept(kept.run, durability)
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    kept.watch()
    (line,) = caplog.messages
    assert "replaced" in line
    assert f"shard-0.{name}" in line
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    successor.push(5)
    successor.die()
    assert snapshot(successor.found()[0]) == snapshot(successor.model)


@pytest.mark.parametrize("durability", ["process", "disk", "none"])
def test_nothing_comes_back_of_a_run_that_is_over_or_was_removed(
    make: MakeKept, durability: str
) -> None:
    kept = make(durability)
    kept.push(0)
    kept.watch()
    kept.storages.discard()
    kept.watch()
    assert kept_shards.kept(kept.run, kept.servers) == []
    again = make(durability)
    again.push(0)
    for directory in (again.run, *kept_shards.places(again.run, again.servers)):
        shutil.rmtree(directory, ignore_errors=True)
    again.watch()
    assert not again.run.exists()
    assert kept_shards.kept(again.run, again.servers) == []


def test_a_run_directory_that_cannot_be_read_is_not_taken_for_a_lost_state(
    make: MakeKept, caplog: pytest.LogCaptureFixture
) -> None:
    Watch(make("process").storages, Path("/", "x" * 300), lambda: None)()
    assert not caplog.messages


@pytest.mark.parametrize("empty", [SHARED, ON_DISK])
def test_a_file_that_was_begun_in_the_other_place_hides_the_state_from_nobody(
    make: MakeKept, empty: str
) -> None:
    """A server was killed, or given up, between making the file and setting its room aside."""
    kept = make("process")
    kept.push(0)
    kept.die()
    shared, on_disk = (
        place / "shard-0.state" for place in kept_shards.places(kept.run, kept.servers)
    )
    on_disk.parent.mkdir(mode=0o700)
    begun, whole = (shared, on_disk) if empty == SHARED else (on_disk, shared)
    if begun == shared:
        shared.rename(on_disk)
    begun.touch(mode=0o600)
    (found,) = kept_shards.kept(kept.run, kept.servers)
    assert (found.path, found.version) == (whole, 1)
    assert snapshot(kept.found()[0]) == snapshot(kept.model)


@pytest.mark.long
@pytest.mark.parametrize("durability", ["process", "disk"])
def test_a_real_server_puts_its_files_back_and_its_successor_has_every_push(
    make_run: MakeRun, durability: str
) -> None:
    run = make_run(durability, "none")
    run.start(keep=False)
    run.join()
    run.initialise()
    run.push(0)
    assert run.is_acknowledged((APPLIED,))
    (kept,) = kept_shards.kept(run.directory, run.servers)
    shutil.rmtree(kept.path.parent)
    while not [k for k in kept_shards.kept(run.directory, run.servers) if not k.problem]:
        run.coordinator.wait_for(m.Report)  # about once a second
    run.push(1)
    assert run.is_acknowledged((APPLIED,))
    os.kill(run.processes[-1].pid, signal.SIGKILL)
    run.processes[-1].wait()
    assert run.start(keep=True).initialised
    run.join()
    parameters = run.fetch()
    assert parameters.version == 2
    assert np.flatnonzero(parameters.values).tolist() == [0, 1]
    assert parameters.values.size == SIZE
    log = next((run.directory / "logs").glob("server-0.1.jsonl")).read_text()
    assert "RemoveIPC" in log
