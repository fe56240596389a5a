"""The texts keep up with the code: commands, files and keys that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dlctl import jobfile, registry
from dlctl.cli.app import cli

ROOT = Path(__file__).parent.parent
TEXTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("examples/*/README.md"))]
PROMISES = ROOT / "RELIABILITY.md"
SECURITY = ROOT / "SECURITY.md"
TESTS = "\n".join(path.read_text() for path in sorted(ROOT.glob("tests/**/*.py")))


def test_every_command_that_the_texts_use_exists() -> None:
    known = set(cli.list_commands(None))  # type: ignore[arg-type]
    for text in TEXTS:
        used = set(re.findall(r"(?:^ {4}|`|\$ |&& )dlctl ([a-z]+)", text.read_text(), re.M))
        assert used <= known, text


def test_every_file_that_the_texts_link_to_exists() -> None:
    for text in TEXTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", text.read_text()):
            assert (text.parent / target).exists(), (text, target)


def test_every_test_file_that_the_texts_name_exists() -> None:
    named = {path for text in TEXTS for path in re.findall(r"\btests/[\w/.]*\w", text.read_text())}
    assert len(named) >= 15
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_test_that_stands_behind_a_promise_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PROMISES.read_text()))
    assert len(named) >= 50
    assert named - set(re.findall(r"^ *def (test_\w+)\(", TESTS, re.M)) == set()


def test_the_deliberate_bugs_are_as_many_as_is_said() -> None:
    (said,) = re.findall(r"\| (\d+) deliberate bugs;", PROMISES.read_text())
    mutants = (ROOT / "tests" / "sim" / "mutants.py").read_text()
    assert int(said) == len(re.findall(r"^@mutant\(", mutants, re.M))


def test_every_hostile_input_has_tests_that_exist() -> None:
    table = SECURITY.read_text().partition("<!-- inputs -->")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    inputs = [row[1].strip() for row in rows]
    assert sorted(set(inputs)) == sorted(inputs) != [], "each of them once"
    assert [row[1] for row in rows if "`test_" not in row[2]] == []
    named = set(re.findall(r"`(test_\w+)`", table))
    assert named - set(re.findall(r"^ *def (test_\w+)\(", TESTS, re.M)) == set()


def test_the_figures_have_a_line_for_every_fault() -> None:
    figures = PROMISES.read_text().partition("<!-- figures -->")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| `([\w-]+)` \|", figures, re.M)
    assert sorted(lines) == sorted(re.findall(r'^@row\(\s*"([\w-]+)"', TESTS, re.M))


def test_the_reading_order_names_files_that_exist() -> None:
    import dlctl

    named = re.findall(r"`((?:dlctl|daemons|tests)/[\w/]+\.py)`", dlctl.__doc__ or "")
    assert len(named) >= 10
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("examples/*/*.toml")), ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_every_example_is_a_valid_job(path: Path) -> None:
    assert jobfile.load(path).workers.count >= 1


def test_the_job_file_in_the_readme_is_valid(tmp_path: Path) -> None:
    block = "".join(re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.S))
    (tmp_path / "train.py").write_text("task = None\n")
    (tmp_path / "job.toml").write_text(block)
    job = jobfile.load(tmp_path / "job.toml")
    assert (job.inner.name, job.schedule.kind, job.gradient.clip_norm) == ("adamw", "cosine", 1.0)


def test_the_readme_has_a_row_for_every_method() -> None:
    rows = [
        line.split("|")[1]
        for line in (ROOT / "README.md").read_text().splitlines()
        if line[:1] == "|"
    ]
    named = {name for row in rows for name in re.findall("`([^`]+)`", row)}
    assert set(registry.BUILT_IN["algorithms"]) <= named
