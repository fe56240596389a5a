"""The last lines of a log say why a daemon ended, however long the traceback is."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from daemons import log_tail
from daemons.log_tail import DETAIL_LINES_MAX, LINES, await_printed, exit_code, last_lines
from dlctl.roles.coordinator.supervision.failure_detector import last_error

TS = "2025-06-15T15:06:40.000Z"


def log_of(path: Path, *records: tuple[str, str, str]) -> Path:
    """level, message, detail."""
    lines = [
        json.dumps({"ts": TS, "level": level, "msg": text, "detail": detail})
        for level, text, detail in records
    ]
    path.write_text("\n".join([*lines, ""]))
    return path


def traceback_of(frames: int) -> str:
    return "".join(f'  File "train.py", line {n}\n    return f()\n' for n in range(frames))


@pytest.mark.parametrize("frames", [0, 1, 4, 5, 20, 150])
def test_an_error_keeps_its_message_and_the_end_of_its_traceback(tmp_path, frames):
    detail = traceback_of(frames) + "KeyError: label"
    bye = ("info", "exit 7: the task failed", "")
    path = log_of(tmp_path / "log", ("info", "starts", ""), ("error", "it raised", detail), bye)
    lines = last_lines(path)
    assert "ERROR it raised" in lines
    assert lines[-1] == "KeyError: label"
    assert len(lines) <= DETAIL_LINES_MAX + 2
    assert last_error(7, lines) == "it raised"
    assert exit_code(path) == 7


def test_an_error_is_not_lost_behind_what_was_printed_after_it(tmp_path):
    printed = [("info", f"saved part {n}", "") for n in range(50)]
    path = log_of(tmp_path / "log", ("error", "old", ""), ("error", "it raised", ""), *printed)
    lines = last_lines(path)
    assert len(lines) == LINES
    assert lines[0] == "ERROR it raised"
    assert lines[-1] == "INFO saved part 49"


def test_the_longest_record_is_read_whole(tmp_path):
    path = log_of(tmp_path / "log", ("error", "\u00e9" * 16_000, "\u00e9" * 16_000))
    assert last_lines(path)[0].startswith("ERROR \u00e9")


def test_what_is_printed_is_shown_as_it_is_and_is_no_error_and_no_exit_code(tmp_path):
    printed = ["printed", "", "ERROR of the task", "exit 0: by the task"]
    lines = [json.dumps({"ts": TS, "level": "info", "msg": text, "stream": "stderr"})
             for text in printed]  # fmt: skip
    path = tmp_path / "log"
    path.write_text("\n".join([*lines, "raw", ""]))
    found = last_lines(path)
    assert found == ("printed", "INFO ERROR of the task", "exit 0: by the task", "raw")
    assert last_error(-6, found) == last_error(-6, ())
    assert exit_code(path) is None


def test_the_last_lines_are_awaited_while_a_process_has_yet_to_write_them(tmp_path, monkeypatch):
    path, may_wait = log_of(tmp_path / "log", ("info", "starts", "")), threading.Event()

    def write() -> None:
        with file:
            may_wait.wait()
            file.write("the last words\n")

    file = path.open("a")
    fcntl.flock(file, fcntl.LOCK_SH)
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(write)
        monkeypatch.setattr(time, "sleep", lambda _: may_wait.set())  # It has looked once.
        await_printed(path)
        writing.result()
    assert last_lines(path)[-1] == "the last words"


def test_a_process_that_never_ends_to_write_is_not_awaited_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(log_tail, "PRINTED_S_MAX", 0.05)
    path = log_of(tmp_path / "log", ("info", "starts", ""))
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        await_printed(path)
    await_printed(tmp_path / "no log")
    assert not (tmp_path / "no log").exists()


DUMP = [
    "Fatal Python error: Segmentation fault",
    "",
    "Thread 0x00007fc72bc956c0 (most recent call first):",
    *(f'  File "loop.py", line {n} in poll' for n in range(20)),
    "",
    "Current thread 0x00007fc74e4a5b80 (most recent call first):",
    *(f'  File "train.py", line {n} in loss' for n in range(20)),
    "",
    "Extension modules: numpy, torch (total: 2)",
]


def test_of_a_crash_the_error_and_the_line_that_it_came_from_are_shown(tmp_path):
    path = tmp_path / "log"
    path.write_text("\n".join(["before", *DUMP, ""]))
    crash = last_lines(path)
    assert crash[0] == DUMP[0]
    assert crash[1:] == tuple(f'  File "train.py", line {n} in loss' for n in range(LINES - 1))
    path.write_text("\n".join([*DUMP[:3], ""]))
    assert last_lines(path) == (DUMP[0], DUMP[2]), "it was killed meanwhile"


def test_a_crash_of_a_child_process_does_not_hide_the_error_after_it(tmp_path):
    path = tmp_path / "log"
    error = {"ts": TS, "level": "error", "msg": "data loader process 7 was killed by SIGSEGV"}
    path.write_text("\n".join([*DUMP, json.dumps(error), ""]))
    lines = last_lines(path)
    assert lines[-1] == "ERROR data loader process 7 was killed by SIGSEGV"
    assert len(lines) == LINES
