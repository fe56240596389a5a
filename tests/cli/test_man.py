"""The manual pages: up to date, complete, sound roff, and opened also where man(1) is missing."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path
from typing import get_type_hints

import pytest

from dlctl import errors, registry
from dlctl.cli import app, manpages
from dlctl.cli.commands import man, plan
from dlctl.cli.keydocs import keys
from dlctl.cli.manpage_job import section_of
from dlctl.cli.roff import Page, to_text
from dlctl.cli.ui import console
from dlctl.config import Choice, JobFile

SECTIONS = [
    "NAME",
    "SYNOPSIS",
    "DESCRIPTION",
    "OPTIONS",
    "EXAMPLES",
    "EXIT STATUS",
    "FILES",
    "ENVIRONMENT",
    "SEE ALSO",
]


@pytest.fixture(autouse=True)
def fresh_console(own_place: Path):
    yield
    console.setup()


def test_the_pages_kept_with_the_sources_are_up_to_date() -> None:
    assert manpages.differences() == [], "run: make man"


def test_a_page_that_is_stale_missing_or_left_over_is_noticed_and_repaired(tmp_path: Path) -> None:
    manpages.write(tmp_path)
    (tmp_path / "man1" / "dlctl.1").write_text("stale")
    (tmp_path / "man1" / "dlctl-man.1").unlink()
    (tmp_path / "man1" / "dlctl-gone.1").touch()
    wrong = ["man1/dlctl-gone.1", "man1/dlctl-man.1", "man1/dlctl.1"]
    assert manpages.differences(tmp_path) == wrong
    assert manpages.write(tmp_path) == wrong
    assert manpages.differences(tmp_path) == []


def test_every_command_has_a_page_with_all_sections() -> None:
    pages = manpages.pages()
    names = ["dlctl", *(f"dlctl-{name}" for name in app.COMMANDS)]
    others = {"man5/dlctl-job.5", "man7/dlctl-hosts.7", "man7/dlctl-slurm.7"}
    assert set(pages) == {f"man1/{name}.1" for name in names} | others
    for name in names:
        headings = re.findall(r"^\.SH (.*)$", pages[f"man1/{name}.1"], re.MULTILINE)
        assert [heading for heading in headings if heading != "COMMANDS"] == SECTIONS, name
        assert f"\n{name} \\- ".replace("-", "\\-", name.count("-")) in pages[f"man1/{name}.1"]


def test_every_exit_code_of_an_error_is_in_the_table() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.exit_code for kind in kinds if issubclass(kind, errors.DlctlError)}
    codes |= {0, app.BUG_EXIT_CODE, app.INTERRUPTED_EXIT_CODE, console.SIGPIPE_EXIT_CODE, 143}
    codes |= {plan.CHANGES_EXIT_CODE}
    assert {int(code) for code, _ in manpages.EXIT_STATUS} == codes


def test_every_key_of_the_job_file_is_documented_with_its_default_and_limits() -> None:
    text = to_text(manpages.pages()["man5/dlctl-job.5"])
    for field in dataclasses.fields(JobFile):
        assert f"[{field.name}]" in text
        kind, _ = section_of(get_type_hints(JobFile)[field.name])
        for key in keys(kind) if kind is not Choice else ():
            assert key.text, f"{field.name}.{key.name} has no text below it"
            assert f" {key.name} " in text
    for kind in ("algorithms", "optimizers", "compressors"):
        for name in registry.BUILT_IN[kind]:
            for key in keys(registry.load(kind, name).Options):
                assert key.text, f"{name}.{key.name} has no text below it"
    assert "(whole number, >= 1, <= 4096) Model replicas." in " ".join(text.split())
    assert '       device = "auto"\n' in text
    assert '("auto" or "cpu" or "cuda")' in " ".join(text.split())


def test_pages_use_only_the_roff_that_we_can_read_back() -> None:
    for name, page in manpages.pages().items():
        for line in page.splitlines():
            macro = line.split(" ")[0]
            known = {'.\\"', ".TH", ".SH", ".SS", ".PP", ".TP", ".RS", ".RE", ".nf", ".fi"}
            assert macro in known or not macro.startswith((".", "'")), (name, line)
        assert "\\" not in to_text(page).replace("\\e", ""), name


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff to judge the roff")
def test_groff_has_no_complaint() -> None:
    for name, page in manpages.pages().items():
        done = subprocess.run(
            ["groff", "-man", "-Tascii", "-ww", "-z"],
            input=page.encode(),
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b""), name


def test_plain_text_of_a_page_reads_like_the_page() -> None:
    page = Page("dlctl-x", 1, "1.0")
    page.heading("NAME")
    page.paragraphs("dlctl-x - it's `bold` and \\ a backslash\n\n.not a command")
    page.item("-f, --flag", "What this does. " * 8)
    page.code("dlctl x |\n  cat '-'")
    assert to_text(str(page)) == (
        "NAME\n\n"
        "       dlctl-x - it's bold and \\ a backslash\n\n"
        "       .not a command\n\n"
        "       -f, --flag\n"
        "              What this does. What this does. What this does. What this does.\n"
        "              What this does. What this does. What this does. What this does.\n\n"
        "           dlctl x |\n"
        "             cat '-'\n"
    )


def test_a_page_is_printed_as_text_where_nobody_has_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert app.run(["man", "job"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("NAME\n\n       dlctl-job - the job file of dlctl\n")
    assert "\\" not in text.replace("\\e", "")


def test_man_opens_the_page_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "man"
    program.write_text('#!/bin/sh\necho "shown: $1"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(console, "is_tty", lambda **_: True)
    assert app.run(["man", "init"]) == 0
    assert capfd.readouterr().out == f"shown: {manpages.FOLDER / 'man1' / 'dlctl-init.1'}\n"


@pytest.mark.parametrize("broken", ["missing", "failing"])
def test_text_is_printed_where_man_is_missing_or_fails(
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if broken == "failing":
        (tmp_path / "man").write_text("#!/bin/sh\nexit 3\n")
        (tmp_path / "man").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(console, "is_tty", lambda **_: True)
    assert app.run(["man"]) == 0
    assert capsys.readouterr().out.startswith("NAME\n\n       dlctl - ")


def test_pages_of_a_wheel_are_found_below_its_prefix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    manpages.write(tmp_path / "share" / "man")
    monkeypatch.setattr("site.getuserbase", lambda: str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    monkeypatch.setattr(man, "__file__", "/nowhere/dlctl/cli/commands/man.py")
    assert man.find("job") == tmp_path / "share" / "man" / "man5" / "dlctl-job.5"


def test_a_page_that_is_not_there_is_answered_with_a_similar_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert app.run(["man", "validat"]) == 4
    assert 'did you mean "validate"?' in capsys.readouterr().err


def test_where_no_pages_are_installed_help_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(man, "_folders", list)
    assert app.run(["man"]) == 4
    assert "next: dlctl --help" in capsys.readouterr().err
