"""The manual: current, complete, and shown wherever dlctl was installed."""

from __future__ import annotations

import dataclasses
import re
import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest

from dlctl import errors, registry
from dlctl.cli import app
from dlctl.cli.commands import man, plan
from dlctl.cli.ui import console
from dlctl.job.config import Choice, JobFile, Launch
from dlctl.util.keydocs import keys
from dlctl.util.outfile import BROKEN_PIPE_EXIT_CODE

FOLDER = Path(__file__).parents[2] / "docs"


def script(name: str) -> ModuleType:
    """A script beside the documents."""
    spec = spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


docs = script("reference")


@pytest.fixture(autouse=True)
def fresh_console(own_place: Path):
    yield
    console.setup()


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return docs.pages()


def test_the_pages_kept_with_the_sources_are_current(pages: dict[str, str]) -> None:
    assert docs.differences(docs.ROOT, pages) == [], "run: make man"


def test_a_page_that_is_stale_missing_or_left_over_is_noticed_and_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: dict[str, str]
) -> None:
    monkeypatch.setattr(docs, "pages", lambda folder: pages)
    for part in ("man", "docs/methods", "docs/optimizers"):
        shutil.copytree(docs.ROOT / part, tmp_path / part)
    (tmp_path / "man/dlctl-ps.md").write_text("stale")
    (tmp_path / "docs/methods/sync.md").unlink()
    (tmp_path / "man/dlctl-gone.md").touch()
    wrong = ["docs/methods/sync.md", "man/dlctl-gone.md", "man/dlctl-ps.md"]
    assert docs.differences(tmp_path, pages) == wrong
    assert docs.write(tmp_path) == wrong
    assert docs.differences(tmp_path, pages) == []


def test_what_is_written_by_hand_around_a_generated_block_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# x(1)\n\n{docs.BEGIN}\nold\n{docs.END}\n\n## See also\n")
    changed = docs._with_block(page, "new")
    assert changed == f"# x(1)\n\n{docs.BEGIN}\n\nnew\n\n{docs.END}\n\n## See also\n"


def test_every_command_and_method_has_a_page(pages: dict[str, str]) -> None:
    commands = {f"man/dlctl-{name}.md" for name in app.cli.lines}
    methods = {f"docs/methods/{name}.md" for name in registry.BUILT_IN["algorithms"]}
    methods |= {f"docs/optimizers/{name}.md" for name in docs.matrix_optimizers()}
    others = {f"man/{name}.md" for name in ("dlctl", "dlctl-job", "dlctl-problems")}
    assert pages.keys() == commands | methods | others
    for name in commands:
        for heading in ("Synopsis", "Options", "Examples"):
            assert f"\n## {heading}\n" in pages[name], name


def test_every_key_of_the_job_file_is_documented(pages: dict[str, str]) -> None:
    text = pages["man/dlctl-job.md"]
    for field in dataclasses.fields(JobFile):
        kind, is_list = docs.section_of(get_type_hints(JobFile)[field.name])
        title = f"[[{field.name}]]" if is_list else f"[{field.name}]"
        section = text.partition(f"\n## `{title}`\n")[2].partition("\n## ")[0]
        assert section, title
        for key in keys(kind) if kind not in (Choice, Launch) else ():
            assert key.text, f"{field.name}.{key.name} has no text below it"
            assert re.search(rf"^- `{re.escape(key.name)}[ `]", section, re.M), key.name
    for kind in ("algorithms", "optimizers", "compressors"):
        for name in registry.BUILT_IN[kind]:
            section = text.partition(f'\n### `name = "{name}"`\n')[2]
            assert section, name
            for key in keys(registry.load(kind, name).Options):
                assert key.text, f"{name}.{key.name} has no text below it"
                assert f"\n- `{key.name}" in text, name


def test_every_exit_code_of_an_error_is_in_the_table(pages: dict[str, str]) -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.exit_code for kind in kinds if issubclass(kind, errors.DlctlError)}
    codes |= {0, app.BUG_EXIT_CODE, app.INTERRUPTED_EXIT_CODE, BROKEN_PIPE_EXIT_CODE, 143}
    codes |= {plan.CHANGES_EXIT_CODE}
    table = pages["man/dlctl.md"].partition("## Exit status")[2].partition("\n## ")[0]
    assert {int(code) for code in re.findall(r"^- `(\d+)`: ", table, re.M)} == codes


def test_no_line_of_prose_begins_a_list_or_heading_by_accident() -> None:
    words = "a " * 46 + "- b + c > d # e 1. f "
    for shift in range(24):
        lines = docs._wrap("x" * shift + " " + words).split("\n")
        assert all(line[:1] not in "-+>#1" for line in lines[1:]), lines


def test_every_page_begins_as_a_man_page_needs_it() -> None:
    build = script("manpages")
    pages = sorted(build.MANUAL.glob("*.md"))
    assert pages
    for page in pages:
        found = build.HEAD.match(page.read_text())
        assert found is not None, page
        assert found[1] == page.stem
        assert "#" not in found[3], page


# ---------------------------------------------------------------- dlctl man


def test_a_page_is_printed_where_nobody_has_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["man", "job"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# dlctl-job(5)\n")
    assert "<!--" not in text
    assert ".md)" not in text


def test_on_a_terminal_the_page_opens_in_the_pager(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("click.echo_via_pager", shown.append)
    monkeypatch.setattr(console, "is_tty", lambda **_: True)
    assert app.run(["man", "start"]) == 0
    assert "dlctl start [OPTIONS] FILE" in shown[0]
    assert "##" not in shown[0]
    assert app.run(["man", "start", "--plain"]) == 0
    assert len(shown) == 1
    assert capsys.readouterr().out.startswith("# dlctl-start(1)\n")


def test_pages_of_a_wheel_come_before_those_of_the_source_tree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "dlctl-job.md").touch()
    monkeypatch.setattr(man, "FOLDERS", (tmp_path, *man.FOLDERS))
    assert man.topics() == {"job": tmp_path / "dlctl-job.md"}


def test_a_page_that_is_not_there_is_answered_with_a_similar_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert app.run(["man", "validat"]) == 4
    assert '"validate"' in capsys.readouterr().err


def test_where_no_pages_are_installed_help_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(man, "FOLDERS", ())
    assert app.run(["man"]) == 4
    assert "next: dlctl --help" in capsys.readouterr().err
