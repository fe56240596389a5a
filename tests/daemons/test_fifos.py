"""FIFOs in the place of files that daemons read and write: no daemon waits for another process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from daemons import log_tail, process
from daemons.files.log_mirror import Mirrored
from daemons.log_file import DaemonLogFile
from daemons.loop import Loop
from dlctl.launch import base, orderfiles
from dlctl.roles.protocol.files import MirrorFailed, ReplaceFile, TakeLog
from dlctl.runs import task_code
from dlctl.util.flock import is_locked
from dlctl.util.regular import NotRegular

LOG = "logs/worker-0.1.jsonl"
IS_FIFO = "is a FIFO, not a regular file"


def fifo(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


def test_a_log_is_not_opened_for_a_new_process(tmp_path: Path) -> None:
    fifo(tmp_path / LOG)
    with pytest.raises(NotRegular, match=IS_FIFO):
        base.open_log(tmp_path, "worker-0", 1)


def test_a_log_has_no_last_lines(tmp_path: Path) -> None:
    assert log_tail.last_lines(fifo(tmp_path / LOG)) == ()


def test_a_log_of_another_host_is_not_written(tmp_path: Path, run_script) -> None:
    loop, path = Loop(), fifo(tmp_path / LOG)
    Mirrored(loop, tmp_path)
    (failed,) = run_script(loop, TakeLog(LOG, 500, b"more"), awaited=1)
    assert isinstance(failed, MirrorFailed)
    assert failed.error == f"{path} {IS_FIFO}"


def test_a_log_is_not_rotated_into_one(tmp_path: Path) -> None:
    (tmp_path / "worker-0.1.jsonl").write_text("full")
    fifo(tmp_path / ".worker-0.1.jsonl.new")
    with pytest.raises(NotRegular, match=IS_FIFO):
        DaemonLogFile(tmp_path / "worker-0.1.jsonl", 2)._rotate()
    assert (tmp_path / "worker-0.1.jsonl").read_text() == "full"


def test_what_an_earlier_process_has_left_is_replaced(tmp_path: Path, run_script) -> None:
    loop = Loop()
    Mirrored(loop, tmp_path)
    fifo(tmp_path / "acks" / ".worker-0.1.tmp")
    run_script(loop, ReplaceFile("acks/worker-0.1", b"all of it"))
    assert (tmp_path / "acks" / "worker-0.1").read_bytes() == b"all of it"
    train = tmp_path / "train.py"
    kept = tmp_path / task_code.CODE / train.relative_to("/")
    fifo(kept.with_name(f".train.py.{os.getpid()}"))
    assert task_code.as_it_was(tmp_path, train, b"task = None") == b"task = None"
    assert kept.read_bytes() == b"task = None"


def test_the_job_of_a_daemon_and_the_lock_of_a_run_are_named(tmp_path: Path) -> None:
    fifo(tmp_path / "job.json")
    fifo(tmp_path / "lock")
    for read in (process.read_job, base.read_job):
        with pytest.raises(NotRegular, match=f"job.json {IS_FIFO}"):
            read(tmp_path)
    with pytest.raises(NotRegular, match=f"lock {IS_FIFO}"):
        is_locked(tmp_path / "lock")


def test_an_order_of_slurm_s_and_what_its_job_has_printed_are_nothing(tmp_path: Path) -> None:
    assert orderfiles.read(fifo(tmp_path / "agent-1.order")) == {}
    assert orderfiles.last_error(fifo(tmp_path / "job.log")) == ""


def test_a_kept_file_of_the_task_is_not_read(tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    fifo(tmp_path / task_code.CODE / train.relative_to("/"))
    assert task_code.as_it_was(tmp_path, train, b"task = None") == b"task = None"
    fifo(train)
    assert task_code.changed(tmp_path) == []
