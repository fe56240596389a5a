"""What to do next: every line of it can be pasted into a shell."""

from __future__ import annotations

import re
from pathlib import Path

import dlctl
from dlctl.cli import app
from dlctl.cli.ui import console
from dlctl.errors import DlctlError
from dlctl.util import hints


def test_every_way_and_what_it_does_have_lines_of_their_own(capsys):
    """Ways were joined by "   |   ": whoever pasted them had both of them done."""
    hint = hints.either("", hints.command("dlctl recover -j x", "loses nothing"), None, "dlctl ps")
    console.error(DlctlError("no", hint=hint))
    assert capsys.readouterr().err == (
        "error: no\n  next: dlctl recover -j x\n        loses nothing\n    or: dlctl ps\n"
    )
    in_a_column = ["next    dlctl recover -j x", "        loses nothing", "or      dlctl ps"]
    assert hints.lines(hint, "next    ") == in_a_column


def test_programs_get_every_way_by_itself():
    hint = hints.either("correct a.py:4 first, then\ndlctl recover", "dlctl ps")
    assert hints.as_data(hint) == {
        "next": "correct a.py:4 first, then dlctl recover",
        "or": ["dlctl ps"],
    }
    assert hints.as_data("") == {"next": "", "or": []}
    assert hints.in_a_line(hint) == "correct a.py:4 first, then dlctl recover; or: dlctl ps"
    assert hints.in_a_line(None) == ""


def test_no_text_of_ours_joins_commands_by_a_pipe():
    """Whatever it says to people: there is one place that lays ways out."""
    root = Path(dlctl.__file__).parents[1]
    files = [*(root / "dlctl").rglob("*.py"), *(root / "daemons").rglob("*.py")]
    joined = re.compile(r" {2,}\| {2,}")
    assert [str(path) for path in files if joined.search(path.read_text())] == []


def test_what_comes_next_is_about_the_run_that_was_named(own_place, capsys):
    """It was about the newest one."""
    hint = hints.either(hints.command("dlctl status", "says more"), "dlctl ps", "dlctl logs -j y")
    at = "dlctl checkpoint export runs/x/ckpt/9-1"
    assert hints.about(at, "x") == at
    expected = "dlctl status -j 'my run'\nsays more\nor: dlctl ps\nor: dlctl logs -j y"
    assert hints.about(hint, "my run") == expected
    assert hints.about(hint, "") == hint
    for given in (["-j", "digits-7f3a"], ["--job", "digits-7f3a"], ["--job=digits-7f3a"]):
        assert app.run(["set", "lr", *given]) == 2
        assert capsys.readouterr().err.endswith("\n  next: dlctl set --list -j digits-7f3a\n")
    assert app.run(["set", "lr"]) == 2
    assert capsys.readouterr().err.endswith("\n  next: dlctl set --list\n")
