"""Log files as daemons leave them: rotated, cut, of several lives, raw text between the JSON."""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import time
from datetime import UTC, datetime

import click
import pytest

from daemons.logs import JsonLines
from dlctl.cli import options
from dlctl.runs import logs
from dlctl.util import values


def line(at: float, msg: str, level: str = "info", **extra):
    return {
        "ts": values.rfc3339(at),
        "level": level,
        "name": "worker-0",
        "inc": 1,
        "msg": msg,
        **extra,
    }


def test_a_tasks_own_fields_take_the_place_of_none_of_ours():
    extra = {"ts": 1, "level": 2, "inc": 3, "schema": 4, "loss": 5}
    record = logging.makeLogRecord({"levelname": "INFO", "msg": "here", **extra})
    written = JsonLines("worker-0", 7).format(record)
    found = logs.parse(written, "worker-0", 7, 0.0)
    assert (found.text, found.level, json.loads(written)["inc"]) == ("here", "info", 7)
    assert found.at == pytest.approx(record.created, abs=0.01)
    assert found.fields == {
        "extra.ts": 1, "extra.level": 2, "extra.inc": 3, "extra.schema": 4, "loss": 5,
    }  # fmt: skip


def texts(lines) -> list[str]:
    return [found.text for found in lines]


def tail(run, name: str, limit: int | None, wanted=None) -> list[str]:
    return texts(logs.tail(logs.list_files(run.path).get(name, []), limit, wanted))


def parsed(raw: str, frames: int) -> logs.Line:
    """The same with so many more calls on the stack."""
    return parsed(raw, frames - 1) if frames else logs.parse(raw, "worker-0", 1, 5.0)


def test_json_of_any_depth_is_a_line_of_text_also_at_the_limit_of_what_can_be_read():
    """One call more or less on the stack decides whether the interpreter can read it at all."""
    raw = '{"ts": "2025-01-01T00:00:00Z", "msg": "x", "a": ' + "[" * 800 + "]" * 800 + "}"
    free = sys.getrecursionlimit() - len(inspect.stack(0))
    for frames in range(free - 20):
        assert parsed(raw, frames).level == logs.TEXT


def test_a_json_line_is_taken_apart_and_other_text_stays_text(run_directory):
    run = run_directory()
    run.log(
        "worker-0",
        3,
        line(1000.5, "hello", "warning", step=7),
        "Traceback (most recent call last):",
    )
    first, second = logs.read(*logs.list_files(run.path)["worker-0"])
    assert (first.at, first.level, first.text, first.fields) == (
        1000.5,
        "warning",
        "hello",
        {"step": 7},
    )
    assert (second.at, second.level, second.text) == (1000.5, logs.TEXT, second.raw)
    assert second.incarnation == 3


@pytest.mark.parametrize(
    "raw",
    ["", "{", "{}", "[1]", '{"msg": 3, "ts": "2025-01-01T00:00:00Z"}', '{"msg": "x"}', "{" * 10_000,
     '{"msg": "x", "ts": "yesterday"}', '{"msg": "x", "ts": 5}', "\x00\x01"],
)  # fmt: skip
def test_what_is_not_such_json_is_shown_as_it_stands(raw):
    found = logs.parse(raw, "worker-0", 1, 5.0)
    assert (found.level, found.text, found.at) == (logs.TEXT, raw, 5.0)


def test_of_a_progress_bar_the_last_state_is_shown():
    assert logs.parse("10%\r50%\r100%", "w", 1, 0.0).text == "100%"


def test_an_unknown_level_is_not_overlooked():
    found = logs.parse('{"ts":"2025-01-01T00:00:00Z","level":"PANIC","msg":"x"}', "w", 1, 0.0)
    assert (found.level, found.severity) == ("panic", logs.LEVELS.index("warning"))


def test_files_are_ordered_by_life_and_age(run_directory):
    run = run_directory()
    for incarnation, suffix in ((10, ""), (2, ".2"), (2, ""), (2, ".1"), (1, "")):
        run.log("worker-0", incarnation, "x", suffix=suffix)
    run.log("server-12", 1, "x")
    (run.path / "logs" / "notes.txt").write_text("no log")
    found = logs.list_files(run.path)
    assert list(found) == ["server-12", "worker-0"]
    assert [(f.incarnation, f.age) for f in found["worker-0"]] == [
        (1, 0), (2, 2), (2, 1), (2, 0), (10, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7, 100])
def test_the_last_lines_come_from_as_many_files_as_needed(run_directory, limit):
    run = run_directory()
    run.log("worker-0", 1, "a", "b")
    run.log("worker-0", 2, "c", "d", suffix=".1")
    run.log("worker-0", 2, "e", "f")
    assert tail(run, "worker-0", limit) == list("abcdef")[-limit:]
    assert tail(run, "worker-0", None) == list("abcdef")
    assert tail(run, "worker-0", limit, lambda x: x.text in "ace") == list("ace")[-limit:]


def test_nothing_is_the_tail_of_nothing(run_directory):
    run = run_directory()
    assert tail(run, "worker-0", 5) == []
    run.log("worker-0", 1)
    assert tail(run, "worker-0", 5) == []
    run.log("worker-0", 1, "x")
    assert tail(run, "worker-0", 0) == []


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("count", [1, 3, 4000])
def test_the_tail_of_a_long_file_is_found_from_its_end(run_directory, count, end):
    run = run_directory()
    path = run.log("worker-0", 1)
    path.write_text("\n".join(f"line {n} {'x' * (n % 97)}" for n in range(count)) + end)
    for limit in (1, 2, 3, 1000):
        found = tail(run, "worker-0", limit)
        assert [t.split()[1] for t in found] == [str(n) for n in range(count)][-limit:]


def test_lines_of_several_daemons_are_merged_by_time_and_keep_their_own_order():
    def made(name: str, *times: float):
        return [logs.Line(name, 1, at, "info", f"{name}{i}", {}, "") for i, at in enumerate(times)]

    clock_set_back = made("b", 1.0, 9.0, 2.0)
    assert texts(logs.in_order([*made("a", 3.0, 5.0), *clock_set_back])) == [
        "b0", "a0", "a1", "b1", "b2",
    ]  # fmt: skip


def test_bytes_that_are_no_text_are_shown_and_not_lost(run_directory):
    run = run_directory()
    run.log("worker-0", 1).write_bytes(b"caf\xe9\r\n\xff\n")
    assert tail(run, "worker-0", 5) == [r"caf\xe9", r"\xff"]


# ---------------------------------------------------------------- following


def follow(run, *names):
    return logs.Follower(run.path, names)


def test_following_begins_at_the_end_and_brings_what_comes(run_directory):
    run = run_directory()
    run.log("worker-0", 1, "old")
    follower = follow(run, "worker-0")
    assert follower.poll() == []
    run.log("worker-0", 1, "new")
    assert texts(follower.poll()) == ["new"]
    assert follower.poll() == []
    assert follower.rest() == []


def test_following_can_begin_with_the_last_lines(run_directory):
    run = run_directory()
    run.log("worker-0", 1, "first life")
    run.log("worker-0", 2, "a", "b", "c")
    follower = follow(run, "worker-0")
    run.log("worker-0", 2, "d")
    assert texts(follower.past(2, None)) == ["b", "c"]
    assert texts(follower.past(None, None)) == ["first life", "a", "b", "c"]
    assert texts(follower.poll()) == ["d"]


def test_a_half_written_line_waits_for_its_other_half(run_directory):
    run = run_directory()
    path = run.log("worker-0", 1)
    follower = follow(run, "worker-0")
    with path.open("a") as file:
        file.write("half ")
        file.flush()
        assert follower.poll() == []
        file.write("line\nrest")
    assert texts(follower.poll()) == ["half line"]
    assert texts(follower.rest()) == ["rest"]


def test_following_goes_on_through_rotation_and_misses_nothing(run_directory):
    run = run_directory()
    follower = follow(run, "worker-0")
    path = run.log("worker-0", 1, "1")
    assert texts(follower.poll()) == ["1"]

    def rotate() -> None:
        for age in (2, 1):
            older = path.with_name(f"{path.name}.{age}")
            if older.exists():
                older.rename(path.with_name(f"{path.name}.{age + 1}"))
        path.rename(path.with_name(f"{path.name}.1"))

    run.log("worker-0", 1, "2")
    rotate()
    run.log("worker-0", 1, "3")
    rotate()
    run.log("worker-0", 1, "4")
    rotate()  # now there is no present file at all
    assert texts(follower.poll()) == ["2", "3", "4"]
    run.log("worker-0", 1, "5")
    assert texts(follower.poll()) == ["5"]
    assert follower.rest() == []


def test_what_comes_right_before_a_rotation_is_followed_too(run_directory, monkeypatch):
    """It comes when files have been listed, and before they are read."""
    run = run_directory()
    follower = follow(run, "worker-0")
    path = run.log("worker-0", 1, "1")
    listed, turns = logs.list_files, iter("23")

    def before_a_rotation(directory):
        found = listed(directory)
        if turn := next(turns, ""):
            run.log("worker-0", 1, f"{turn} before")
            path.rename(path.with_name(f"{path.name}.{4 - int(turn)}"))
            run.log("worker-0", 1, f"{turn} after")
        return found

    monkeypatch.setattr(logs, "list_files", before_a_rotation)
    found = [line for _ in range(3) for line in texts(follower.poll())]
    assert found == ["1", "2 before", "2 after", "3 before", "3 after"]


def test_no_file_stays_open_and_one_that_is_begun_anew_is_read_again(run_directory):
    run = run_directory()
    follower = follow(run, "worker-0")
    path = run.log("worker-0", 1, "1", "2")
    before = len(os.listdir("/proc/self/fd"))
    assert texts(follower.poll()) == ["1", "2"]
    assert len(os.listdir("/proc/self/fd")) == before
    path.write_text("3\n")
    assert texts(follower.poll()) == ["3"]


def test_following_goes_on_through_restarts_and_waits_for_late_comers(run_directory):
    run = run_directory()
    follower = follow(run, "worker-0", "worker-1")
    run.log("worker-0", 1, line(1.0, "a"))
    run.log("worker-0", 2, line(3.0, "c"))
    run.log("worker-1", 1, line(2.0, "b"))
    run.log("server-0", 1, line(2.0, "not asked for"))
    assert [(x.text, x.incarnation) for x in follower.poll()] == [("a", 1), ("b", 1), ("c", 2)]
    assert follower.rest() == []


def test_a_line_without_end_does_not_fill_the_memory(run_directory, monkeypatch):
    monkeypatch.setattr(logs, "LINE_BYTES_MAX", 1000)
    run = run_directory()
    path = run.log("worker-0", 1)
    follower = follow(run, "worker-0")
    path.write_text("x" * 2500)
    assert [len(t) for t in texts(follower.rest())] == [1000, 1000, 500]
    assert [len(t) for t in tail(run, "worker-0", 5)] == [1000, 1000, 500]


def test_times_are_given_as_ages_or_iso(clock_stands):
    assert options.moment("10m") == time.time() - 600
    at = datetime(2025, 6, 15, 11, 0, tzinfo=UTC).timestamp()
    assert options.moment("2025-06-15T11:00:00Z") == at
    assert options.moment("2025-06-15 11:00:00+00:00") == at
    local = datetime(2025, 6, 15, 11, 0).timestamp()
    assert options.moment("2025-06-15T11:00:00") == local
    with pytest.raises(click.BadParameter, match="neither a duration"):
        options.moment("noon")


def test_last_words_are_those_of_the_newest_life(run_directory):
    run = run_directory()
    run.log("worker-0", 1, "old")
    run.log("worker-0", 2, line(1.0, "a"), "b", "c")
    assert logs.last_log_lines(run.path, "worker-0", 2) == ["b", "c"]
    assert logs.last_log_lines(run.path, "worker-1") == []


def test_a_line_that_is_being_written_is_followed_as_one(tmp_path) -> None:
    (tmp_path / "logs").mkdir()
    file = tmp_path / "logs" / "worker-0.1.jsonl"
    old, new = (
        json.dumps({"ts": values.rfc3339(n), "level": "error", "msg": f"line {n}"}) for n in (1, 2)
    )
    for size in range(len(new)):
        file.write_text(f"{old}\n{new[:size]}")
        follower = logs.Follower(tmp_path, ["worker-0"])
        file.write_text(f"{old}\n{new}\n")
        assert [line.text for line in follower.past(10, None)] == ["line 1"]
        assert [(line.level, line.text) for line in follower.poll()] == [("error", "line 2")]
