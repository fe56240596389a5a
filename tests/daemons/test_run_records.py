"""What the coordinator writes down stays right through failures and later executions."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_daemon import orphan
from full_disk import LARGE, fill, free_space

from daemons.coordinator import records
from daemons.coordinator.past import read_past
from daemons.loop import Loop
from dlctl.records.manifest import MANIFEST
from dlctl.roles.coordinator import records as j
from dlctl.runs import checkpoints, lineage, paths
from dlctl.runs.database import RunDb
from dlctl.util import processes
from dlctl.util.names import HOME_AGENT


def manifest(number: int, directory: Path) -> dict[str, Any]:
    """Of a model of two elements, whose only shard is written here."""
    file = "shard-0.safetensors"
    arrays = {"w": np.ones(2, np.float32)}
    arrays |= {"averaged": np.zeros(0)}
    sha256, nbytes = checkpoints.write_arrays(directory / file, arrays)
    shard = {"name": "server-0", "file": file, "sha256": sha256, "nbytes": nbytes}
    return {
        "run_id": "digits-7f3a",
        "job": "digits",
        "number": number,
        "step": number * 10,
        "samples": number,
        "layout": [["w", "trained", [2], "float32", []]],
        "size": 2,
        "algorithm": {"name": "downpour", "options": {}},
        "optimizer": "sgd",
        "shards": [{**shard, "state": {}, "lo": 0, "hi": 2}],
        "workers": [],
        "data": {"portions": []},
        "evaluation": None,
    }


def save(record: Any, number: int, keep: int = 1, **changes: Any) -> j.CheckpointEnded:
    """A whole checkpoint. `changes`: of its manifest."""
    (begun,) = record(j.BeginCheckpoint(number, number * 10), awaited=1)
    made = manifest(number, Path(begun.directory)) | changes
    complete = j.CompleteCheckpoint(number, begun.directory, made, keep)
    (ended,) = record(complete, awaited=1)
    return ended


def row(name: str, incarnation: int) -> dict[str, Any]:
    known = {"name": name, "role": "worker", "incarnation": incarnation, "agent": HOME_AGENT}
    return {**known, "state": "running", "pid": None}


def test_an_old_checkpoint_that_cannot_be_removed_does_not_spoil_the_new_one(
    tmp_path, record, caplog
):
    stuck = checkpoints.create(tmp_path, 10, 1)
    (stuck / MANIFEST).mkdir()  # not even root can unlink a directory
    with caplog.at_level(logging.WARNING):
        ended = save(record, 2)
    assert ended.error == ""
    assert f"{stuck}: " in caplog.text
    assert lineage.newest_good(tmp_path)[0].name == "000000000020-2"


def spoil(directory: Path) -> None:
    """Flip a bit of a checkpoint's shard."""
    shard = directory / "shard-0.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def go_back(run_directory: Path) -> None:
    """Resume from the newest good checkpoint, as `recover` and `start` do."""
    good = lineage.newest_good(run_directory)
    assert good is not None
    with closing(RunDb(run_directory)) as db:
        lineage.record(db, run_directory, good[0], "")
        db.commit()


def numbers(run_directory: Path) -> list[int]:
    return [checkpoints.number(path)[0] for path in checkpoints.finished(run_directory)]


def test_damaged_checkpoints_take_the_place_of_no_good_one(tmp_path, record):
    """The run went back to 4, because 5 and 6 were damaged: these go as soon as if they counted."""
    for number in range(1, 7):
        save(record, number, keep=4)
    for damaged in checkpoints.finished(tmp_path)[-2:]:
        spoil(damaged)
    go_back(tmp_path)
    found = []
    for number in (7, 8, 9):
        save(record, number, keep=3)
        found.append(numbers(tmp_path))
    assert found == [[3, 4, 5, 6, 7], [4, 6, 7, 8], [7, 8, 9]]


def test_what_is_saved_by_failures_takes_the_place_of_no_other_one(tmp_path, record):
    """However often somebody brings back a run that fails again, one of before that is left."""
    for number in (1, 2):
        save(record, number, keep=2)
    found = []
    for number in range(3, 7):
        save(record, number, keep=2, failure="no worker is left: worker-0: ruined")
        found.append(numbers(tmp_path))
    assert found == [[1, 2, 3], [1, 2, 3, 4], [1, 2, 4, 5], [1, 2, 5, 6]]
    save(record, 7, keep=2)
    assert numbers(tmp_path) == [2, 6, 7]
    save(record, 8, keep=2)
    assert numbers(tmp_path) == [7, 8]


def test_without_the_database_no_old_checkpoint_is_removed(tmp_path, record, monkeypatch, caplog):
    """Nobody knows then which of them count."""

    def events(*_: Any, **__: Any) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    save(record, 1)
    monkeypatch.setattr(RunDb, "events", events)
    with caplog.at_level(logging.WARNING):
        assert save(record, 2).error == ""
    assert "checkpoints" in caplog.text
    assert numbers(tmp_path) == [1, 2]


def test_whatever_pruning_raises_the_checkpoint_is_good(record, monkeypatch, caplog):
    def prune(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(lineage, "superfluous", prune)
    with caplog.at_level(logging.WARNING):
        assert save(record, 1).error == ""
    assert "checkpoints" in caplog.text


def test_a_new_attempt_makes_room_by_removing_what_failed_ones_left(tmp_path, record):
    assert save(record, 1).error == ""
    for number in (2, 3):
        failed = checkpoints.create(tmp_path, number * 10, number)
        (failed / "shard-0.safetensors").write_bytes(b"half")
    record(j.BeginCheckpoint(4, 40), awaited=1)
    left = sorted(entry.name for entry in (tmp_path / "ckpt").iterdir())
    assert left == ["000000000010-1", "000000000040-4"]


def test_a_number_that_is_on_disk_only_is_not_given_again(tmp_path, record):
    """The coordinator died between the directory, or the manifest, and the row."""
    record(j.RecordCheckpoint(3, {"number": 3}))
    with closing(RunDb(tmp_path)) as db:
        assert read_past(tmp_path, db, {}).checkpoints == 3
        checkpoints.create(tmp_path, 50, 5)
        assert read_past(tmp_path, db, {}).checkpoints == 5


def test_a_number_that_servers_know_is_not_given_again_when_nothing_else_is_left_of_it(
    tmp_path, record, monkeypatch
):
    """They would answer for files that the coordinator removed which died before it made its own
    directory.
    """
    record(j.RecordCheckpoint(4, {"number": 4}))
    record(j.Remember("checkpoints", 5), j.BeginCheckpoint(5, 50), awaited=1)

    def create(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "create", create)
    (begun,) = record(j.BeginCheckpoint(6, 60), awaited=1)
    assert begun.error.endswith(os.strerror(errno.ENOSPC))
    assert [*(tmp_path / "ckpt").iterdir()] == []
    with closing(RunDb(tmp_path)) as db:
        assert read_past(tmp_path, db, {}).checkpoints == 5


def test_a_number_that_daemons_may_know_from_a_full_disk_is_not_given_again(tmp_path, record):
    """Nothing is written for 90 s, the coordinator dies, and those whom it asked live."""
    record(j.Remember("checkpoints", 5))
    with closing(RunDb(tmp_path)) as db:
        db.put_run(updated_at=time.time() - 90.0)
        assert 5 + 90 <= read_past(tmp_path, db, {"agent-0": 1}).checkpoints < 5 + 100
        assert read_past(tmp_path, db, {}).checkpoints == 5


def test_what_a_coordinator_did_and_could_not_write_is_known_to_the_next_one(tmp_path, record):
    """It touched its lock until it died, 8 s ago, and could not write for 23 s before."""
    record(j.Remember("checkpoints", 5))
    lock, now = tmp_path / paths.LOCK, time.time()
    lock.touch()
    os.utime(lock, (now - 8.0, now - 8.0))
    ended = {"code": -9, "text": "killed by SIGKILL", "at": now - 40.0, "last_lines": []}
    with closing(RunDb(tmp_path)) as db:
        db.put_run(updated_at=now - 31.0)
        db.put_daemon("worker-0", {"name": "worker-0", "incarnation": 2, "last_exit": ended})
        db.put_daemon("worker-1", {"name": "worker-1", "incarnation": 1, "last_exit": None})
        past = read_past(tmp_path, db, {"agent-0": 1})
    assert past.unwritten_s == pytest.approx(23.0, abs=0.1)
    assert past.daemons["worker-1"]["last_exit"] is None
    exited_at = past.daemons["worker-0"]["last_exit"]["at"]
    assert time.monotonic() - exited_at == pytest.approx(40.0, abs=2.0)


def test_a_run_that_is_moved_while_it_resumes_finds_its_checkpoint(tmp_path, record):
    """It was killed before all were at work, so the checkpoint is needed; they are told of it."""
    save(record, 1)
    record(j.Remember("run", ["starting", "", None]))
    (saved,) = checkpoints.complete(tmp_path)
    place = tmp_path / "elsewhere"
    place.mkdir()
    for name in ("run.db", "ckpt"):
        (tmp_path / name).rename(place / name)
    with closing(RunDb(place)) as db:
        db.put_run(resume=str(saved))
        past = read_past(place, db, {})
        assert past.restore == str(place / "ckpt" / saved.name)
        assert past.manifest["step"] == 10
        db.put_memory({"run": ["running", "", 0.0]})
        assert (read_past(place, db, {}).restore, read_past(place, db, {}).manifest) == ("", {})


@pytest.mark.parametrize("damage", [Path.unlink, partial(os.truncate, length=80)])
@pytest.mark.parametrize("kind", ["shards", "workers"])
def test_a_checkpoint_without_a_file_that_was_said_to_be_saved_is_not_complete(
    tmp_path, record, kind, damage
):
    save(record, 1)
    (begun,) = record(j.BeginCheckpoint(2, 20), awaited=1)
    directory = Path(begun.directory)
    made = manifest(2, directory)
    residual = {"residual": np.ones(2)}
    sha256, nbytes = checkpoints.write_arrays(directory / "worker-0.safetensors", residual)
    worker = {"name": "worker-0", "file": "worker-0.safetensors", "sha256": sha256}
    made["workers"] = [{**worker, "nbytes": nbytes, "state": {}}]
    damage(directory / made[kind][0]["file"])
    (ended,) = record(j.CompleteCheckpoint(2, str(directory), made, 1), awaited=1)
    assert ended.error.count(made[kind][0]["file"]) == 1
    assert numbers(tmp_path) == [1], "the old one stays"


class LastMoments:
    """The end of a run whose last event finds no room in the database."""

    def __init__(self, directory: Path) -> None:
        RunDb(directory, create=True).close()
        self.directory = directory
        self.db = RunDb(directory)
        self.loop = Loop()
        self.records = records.RunRecords(directory, self.db, self.loop)
        fill(self.db)
        self.loop._performers[j.AddEvent](LARGE)
        self.records.commit()
        self.loop._performers[j.StatusSnapshot](j.StatusSnapshot({"state": "stopped"}, ()))

    def finish(self) -> str | None:
        """The state that is on record when the coordinator has left."""
        try:
            self.records.finish("stopped")
        finally:
            self.loop.transport.close()
            self.db.close()
        with closing(RunDb(self.directory, readonly=True)) as reader:
            return reader.run().get("state")


def test_an_end_right_after_the_disk_was_full_is_on_record(tmp_path):
    """Within the second after which a commit that failed is tried again."""
    last = LastMoments(tmp_path)
    free_space(last.db)
    assert last.finish() == "stopped"


def test_an_end_waits_for_room_to_be_put_on_record(tmp_path, monkeypatch):
    last = LastMoments(tmp_path)
    pauses: list[float] = []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 3:
            free_space(last.db)

    monkeypatch.setattr(records.time, "sleep", sleep)
    assert last.finish() == "stopped"
    assert len(pauses) == 3


def test_an_end_that_finds_no_room_is_an_end_and_the_log_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(records, "FINISH_S", 0.0)
    assert LastMoments(tmp_path).finish() is None
    assert "the end of the run is not on record: database or disk is full" in caplog.text


def test_of_what_waits_for_room_the_newest_history_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ROWS_KEPT", 2)
    last = LastMoments(tmp_path)
    for number in range(3):
        last.loop._performers[j.AddEvent](replace(LARGE, text=f"{number} {LARGE.text}"))
    last.loop._performers[j.AddMetric](j.AddMetric("worker-0", 1, {}))
    last.records._retry_at = 0.0
    last.records.commit()
    free_space(last.db)
    assert last.finish() == "stopped"
    with closing(RunDb(tmp_path, readonly=True)) as reader:
        assert [event["text"][0] for event in reader.events()] == ["1", "2"]
    assert steps_of(tmp_path, "worker-0") == []


def test_who_leads_the_run_is_on_record_however_much_has_waited_for_room_since(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(records, "ROWS_KEPT", 2)
    last = LastMoments(tmp_path)
    last.records.begin({}, control="ipc://here", control_key="key", started_at=1.0, incarnation=2)
    for _ in range(3):
        last.loop._performers[j.AddEvent](LARGE)
    last.records._retry_at = 0.0
    last.records.commit()
    assert last.records.trouble != ""
    free_space(last.db)
    last.loop._performers[j.StatusSnapshot](j.StatusSnapshot({"state": "stopped"}, ()))
    assert last.finish() == "stopped"
    with closing(RunDb(tmp_path, readonly=True)) as reader:
        run = reader.run()
    expected = {"control": "ipc://here", "control_key": "key", "started_at": 1.0, "incarnation": 2}
    assert {key: run.get(key) for key in expected} == expected
    assert run["pid"] == os.getpid()


def test_a_run_without_checkpoints_begins_at_none(tmp_path, record):
    with closing(RunDb(tmp_path)) as db:
        assert read_past(tmp_path, db, {}).checkpoints == 0


def test_metrics_of_a_daemon_are_kept_every_ten_seconds_at_most(tmp_path, monkeypatch):
    """Of two that report every second, one of them from the fifth on."""
    second = 0
    clock = SimpleNamespace(time=time.time, monotonic=lambda: float(second))
    monkeypatch.setattr(records, "time", clock)
    loop = Loop()
    with closing(RunDb(tmp_path, create=True)) as db:
        written = records.RunRecords(tmp_path, db, loop)
        for second in range(25):
            loop._performers[j.AddMetric](j.AddMetric("worker-0", second, {}))
            if second >= 5:
                loop._performers[j.AddMetric](j.AddMetric("worker-1", second, {}))
        written.commit()
    loop.transport.close()
    assert steps_of(tmp_path, "worker-0") == [0, 10, 20]
    assert steps_of(tmp_path, "worker-1") == [5, 15]


def steps_of(directory: Path, name: str) -> list[int]:
    with closing(RunDb(directory)) as db:
        return [row["step"] for row in db.metrics(name)]


def test_a_daemon_that_the_job_no_longer_has_is_not_shown_but_counted_on(tmp_path, record):
    record(j.StatusSnapshot({}, (row("worker-0", 1), row("worker-1", 4))))
    record(j.StatusSnapshot({}, (row("worker-0", 2),)))
    with closing(RunDb(tmp_path)) as db:
        assert [shown["name"] for shown in db.daemons()] == ["worker-0"]
        assert read_past(tmp_path, db, {}).incarnations == {"worker-0": 2, "worker-1": 4}
    record(j.StatusSnapshot({}, (row("worker-0", 3), row("worker-1", 5))))
    with closing(RunDb(tmp_path)) as db:
        assert [shown["incarnation"] for shown in db.daemons()] == [3, 5]


def test_a_daemon_that_came_again_and_was_removed_at_once_is_counted_on(tmp_path, record):
    record(
        j.StatusSnapshot({}, (row("worker-0", 1), row("worker-1", 1))),
        j.StatusSnapshot({}, (row("worker-0", 1), row("worker-1", 2))),
        j.StatusSnapshot({}, (row("worker-0", 1),)),
    )
    with closing(RunDb(tmp_path)) as db:
        assert [shown["name"] for shown in db.daemons()] == ["worker-0"]
        assert read_past(tmp_path, db, {}).incarnations == {"worker-0": 1, "worker-1": 2}


def test_a_daemon_that_is_still_there_stays_in_sight(tmp_path, record):
    with orphan(tmp_path, "worker-1", 1) as process:
        record(j.StatusSnapshot({}, ({**row("worker-1", 1), "pid": process.pid},)))
        record(j.StatusSnapshot({}, (row("worker-0", 1),)))
    with closing(RunDb(tmp_path)) as db:
        assert [shown["name"] for shown in db.daemons()] == ["worker-0", "worker-1"]


def test_a_process_that_is_gone_keeps_its_start_until_another_one_has_its_pid(tmp_path):
    """A reader finds by the start that the process has gone."""
    with orphan(tmp_path, "worker-1", 1) as process:
        shown = {**row("worker-1", 1), "pid": process.pid}
        start = processes.start_of(process.pid)
        assert records.start_of(tmp_path, shown) == start
    assert records.start_of(tmp_path, shown) == start
    assert records.start_of(tmp_path, {**shown, "incarnation": 2}) is None


@pytest.mark.parametrize(("name", "incarnation"), [("worker-1", 2), ("worker-2", 1)])
def test_a_pid_that_somebody_else_has_now_is_nobody_s(tmp_path, record, name, incarnation):
    """As after a restart of the machine: what an earlier coordinator knew of pids is outdated."""
    with orphan(tmp_path, name, incarnation) as process:
        record(j.StatusSnapshot({}, ({**row("worker-1", 1), "pid": process.pid},)))
    with closing(RunDb(tmp_path)) as db:
        assert [shown["pid_start"] for shown in db.daemons()] == [None]


def test_a_directory_that_cannot_be_made_is_an_error_of_that_checkpoint(tmp_path, record):
    checkpoints.create(tmp_path, 10, 1)
    (begun,) = record(j.BeginCheckpoint(1, 10), awaited=1)
    assert begun.directory == ""
    assert os.strerror(errno.EEXIST) in begun.error


def test_the_database_has_no_table_that_nobody_uses(tmp_path, record):
    with closing(sqlite3.connect(tmp_path / "run.db")) as db:
        names = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    tables = {"run", "daemon", "event", "metric", "checkpoint", "memory"}
    assert names == {*tables, "metric_by_daemon", "sqlite_autoindex_run_1"} | {
        f"sqlite_autoindex_{table}_1" for table in ("daemon", "memory")
    }
