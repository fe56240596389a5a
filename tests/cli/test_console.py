"""What is written to the terminal: data on stdout, the rest on stderr, nothing foreign as it is."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from dlctl.cli.ui import console
from dlctl.errors import DlctlError, UsageError


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    console.setup()
    yield
    console.setup()


def test_data_goes_to_stdout_and_all_else_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    console.out("data")
    console.note("a note")
    console.warn("careful")
    console.error(DlctlError("it failed", where="a.toml:3", hint="dlctl validate a.toml"))
    captured = capsys.readouterr()
    assert captured.out == "data\n"
    assert captured.err == (
        "a note\nwarning: careful\n"
        "error: it failed\n  --> a.toml:3\n  next: dlctl validate a.toml\n"
    )


def test_what_goes_to_one_place_keeps_its_order() -> None:
    """As with 2>&1: stdout has a buffer when it is no terminal."""
    code = (
        "from dlctl.cli.ui import console\n"
        "for n in range(3): console.out(f'data {n}'); console.note(f'note {n}')\n"
    )
    said = subprocess.check_output([sys.executable, "-c", code], stderr=subprocess.STDOUT)
    assert said.decode().splitlines() == [
        f"{what} {n}" for n in range(3) for what in ("data", "note")
    ]


def test_quiet_drops_notes_and_hints_but_never_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    console.setup(quiet=True)
    console.note("a note")
    console.warn("careful")
    assert capsys.readouterr().err == "warning: careful\n"
    assert (console.settings.quiet, console.progress_style()) == (True, "quiet")


def test_json_is_one_object_on_one_line_and_always_valid(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console.out_json(
        "dlctl.test/1", {"loss": math.nan, "rates": [math.inf, 1.5], "text": "\x1bä\n"}
    )
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert "\x1b" not in line
    read = json.loads(line, parse_constant=lambda text: pytest.fail(text))
    assert read == {"schema": "dlctl.test/1", "loss": None, "rates": [None, 1.5], "text": "\x1bä\n"}
    assert line.startswith('{"schema": "dlctl.test/1"')


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, "a table\n"),
        ({"quiet": True}, "a\\x1b\nb\n"),
        ({"json": True}, '{"schema": "dlctl.test/1", "rows": 2}\n'),
        ({"json": True, "quiet": True}, '{"schema": "dlctl.test/1", "rows": 2}\n'),
    ],
)
def test_a_result_is_shown_as_text_names_or_json(
    options: dict[str, bool], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    console.setup(**options)
    console.show("dlctl.test/1", {"rows": 2}, "a table", ["a\x1b", "b"])
    assert capsys.readouterr().out == shown


def test_lines_are_written_above_the_live_line(capsys: pytest.CaptureFixture[str]) -> None:
    console.put_live("50%")
    console.note("a\x1b note")
    console.put_live("")
    console.put_live("")
    erase = console.ERASE
    assert capsys.readouterr().err == f"{erase}50%{erase}a\\x1b note\n50%{erase}"


@pytest.mark.parametrize(
    ("foreign", "shown"),
    [
        ("plain text, äöü 漢字", "plain text, äöü 漢字"),
        ("\x1b[31mred\x1b]0;title\x07", r"\x1b[31mred\x1b]0;title\x07"),
        ("two\nlines\r\tand\0", r"two\nlines\r\tand\x00"),
        ("\x9b31m C1 \x85", r"\x9b31m C1 \x85"),
        ("user\u202etxt.exe\u2066 \u200b\u2028", r"user\u202etxt.exe\u2066 \u200b\u2028"),
        ("lone \udce9 surrogate", r"lone \udce9 surrogate"),
        ("non\u00a0breaking", "non\u00a0breaking"),
    ],
)
def test_foreign_text_is_made_harmless(foreign: str, shown: str) -> None:
    assert console.escape(foreign) == shown
    assert console.escape(shown) == shown
    table = console.table([{"": foreign, " ": console.style(foreign)}])
    assert table.splitlines()[1].rstrip() == f"{shown}  {shown}".rstrip()


def test_errors_escape_what_they_quote(capsys: pytest.CaptureFixture[str]) -> None:
    console.error(UsageError("no \x1b[2J\nsecond line", where="a\nb", hint="x\x07"))
    expected = "error: no \\x1b[2J\nsecond line\n  --> a\\nb\n  next: x\\x07\n"
    assert capsys.readouterr().err == expected


def test_a_table_has_two_spaces_between_columns_and_cuts_nothing() -> None:
    rows = [
        {"NAME": "server-0", ">PID": 41233, "STATE": "running"},
        {"NAME": "worker-10", ">PID": None, "STATE": "x" * 200},
    ]
    lines = console.table(rows).split("\n")
    assert lines == [
        "NAME         PID  STATE",
        "server-0   41233  running",
        "worker-10      -  " + "x" * 200,
    ]


def test_a_table_is_aligned_by_what_is_seen_not_by_colour_codes() -> None:
    console.setup(color="always")
    rows = [{"STATE": console.style("ok", fg="green"), "X": "a"}, {"STATE": "longer", "X": "b"}]
    lines = click.unstyle(console.table(rows)).split("\n")
    assert [line.index(mark) for line, mark in zip(lines, "Xab", strict=True)] == [8, 8, 8]


@pytest.mark.parametrize(
    ("color", "environment", "on_a_terminal", "coloured"),
    [
        ("auto", {}, True, True),
        ("auto", {}, False, False),
        ("auto", {"NO_COLOR": "1"}, True, False),
        ("auto", {"NO_COLOR": ""}, True, True),
        ("auto", {"TERM": "dumb"}, True, False),
        ("auto", {"FORCE_COLOR": "1"}, False, True),
        ("auto", {"FORCE_COLOR": "0"}, False, False),
        ("auto", {"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
        ("always", {"NO_COLOR": "1", "TERM": "dumb"}, False, True),
        ("never", {"FORCE_COLOR": "1"}, True, False),
    ],
)
def test_the_flag_wins_over_the_environment_and_that_over_the_terminal(
    color: str,
    environment: dict[str, str],
    on_a_terminal: bool,
    coloured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    stream.isatty = lambda: on_a_terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", stream)
    console.setup(color=color)
    assert console.style("x", fg="red", bold=True) == (
        "\x1b[31m\x1b[1mx\x1b[0m" if coloured else "x"
    )


def test_progress_is_plain_where_there_is_no_terminal() -> None:
    assert console.progress_style() == "plain"
    console.setup(progress="json", quiet=True)
    assert console.progress_style() == "json"


def test_text_that_the_terminal_cannot_show_is_escaped_not_fatal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    console.setup()
    console.out("é → x")
    console.flush()
    assert buffer.getvalue() == b"\\xe9 \\u2192 x\n"


def test_a_program_started_without_stdout_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    console.out("nobody sees this")
    assert not console.is_tty()


def test_a_full_disk_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(DlctlError, match=os.strerror(errno.ENOSPC)):
            console.out("data", flush=True)
