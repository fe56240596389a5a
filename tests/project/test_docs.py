"""The documents keep up with the code: commands, keys, methods, faults and links exist."""

from __future__ import annotations

import re
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path

import pytest

import dlctl
from dlctl import jobfile, registry
from dlctl.cli.app import cli
from dlctl.job.config import ReplicaProcesses
from dlctl.jobfile import replicas
from dlctl.util import extras

ROOT = Path(__file__).parents[2]
SITE, MANUAL = ROOT / "docs", ROOT / "man"
TEXTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("man/*.md"),
     *ROOT.glob("examples/*/README.md"), *ROOT.glob("benchmarks/**/*.md")]
)  # fmt: skip
TESTS = "\n".join(path.read_text() for path in sorted(ROOT.glob("tests/**/*.py")))
LIMITS = {"README.md": 15_000, "RELIABILITY.md": 12_000, "SECURITY.md": 6_000}
"""Bytes. Details belong in docs/."""


def named(text: Path) -> str:
    return str(text.relative_to(ROOT))


def anchors(text: Path) -> set[str]:
    """Of its headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", text.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def test_every_command_that_the_documents_use_exists() -> None:
    known = set(cli.list_commands(None))  # type: ignore[arg-type]
    for text in TEXTS:
        used = set(
            re.findall(r"(?:^ {4}|`|\$ |&& )dlctl ([a-z]+)(?![\w<])", text.read_text(), re.M)
        )
        assert used <= known, named(text)


def test_every_link_resolves() -> None:
    broken = []
    for text in TEXTS:
        for target in re.findall(r"\]\(([^)\s]+)\)", text.read_text()):
            file, _, anchor = target.partition("#")
            path = text.parent / file if file else text
            if "://" in target:
                continue
            # The site has nothing but docs/ and man/.
            is_of_site = SITE in text.parents or MANUAL in text.parents
            there = path.resolve()
            is_on_site = not is_of_site or SITE in there.parents or MANUAL in there.parents
            if not (path.exists() and is_on_site) or (anchor and anchor not in anchors(path)):
                broken.append((named(text), target))
    assert broken == []


def test_every_page_of_the_site_is_in_its_navigation() -> None:
    """With the links, what a strict build of the site would refuse."""
    entries = re.findall(r"(\S+\.md)$", (SITE / ".nav.yml").read_text(), re.M)
    pages = [str(page.relative_to(SITE)) for page in SITE.glob("**/*.md")]
    pages += [f"manual/{page.name}" for page in MANUAL.glob("*.md")]
    assert [page for page in pages if not any(fnmatch(page, entry) for entry in entries)] == []
    assert [entry for entry in entries if not any(fnmatch(page, entry) for page in pages)] == []


def test_every_test_and_test_file_that_the_documents_name_exists() -> None:
    texts = "\n".join(text.read_text() for text in TEXTS if text.name != "CHANGELOG.md")
    files = set(re.findall(r"\btests/[\w/.]*\w", texts))
    assert [path for path in sorted(files) if not (ROOT / path).exists()] == []
    tests = set(re.findall(r"`(test_\w+)`", texts))
    assert tests - set(re.findall(r"^ *def (test_\w+)\(", TESTS, re.M)) == set()


def test_every_hostile_input_is_named_once_and_has_tests() -> None:
    table = (ROOT / "docs/hostile-inputs.md").read_text()
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    inputs = [row[1].strip() for row in rows]
    assert sorted(set(inputs)) == sorted(inputs) != []
    assert [row[1] for row in rows if "`test_" not in row[2]] == []


@pytest.mark.parametrize("path", ["RELIABILITY.md", "benchmarks/results/faults.md"])
def test_every_fault_that_is_tried_on_real_processes_has_its_line(path: str) -> None:
    rows = set(re.findall(r'^@row\(\s*"([\w-]+)"', TESTS, re.M))
    lines = [line for line in (ROOT / path).read_text().splitlines() if line.startswith("| ")]
    assert rows - set(re.findall(r"`([\w-]+)`", "\n".join(lines))) == set()


def test_what_a_replica_cannot_be_split_by_is_in_the_manual() -> None:
    ways = {field.name for field in fields(ReplicaProcesses)} & {"fsdp", "tensor", "pipeline"}
    for page in ("docs/model.md", "man/dlctl-job.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert [name for name in (*replicas.WHOLE, *ways) if name not in text] == [], page
        assert [word for word in ("reentrant", "hook on its gradient") if word not in text] == []


def test_the_table_of_methods_is_complete() -> None:
    methods = set(registry.BUILT_IN["algorithms"])
    for path, link in (("README.md", r"\(docs/methods/([\w-]+)\.md\)"),
                       ("docs/methods/index.md", r"\(([\w-]+)\.md\)")):  # fmt: skip
        lines = [line for line in (ROOT / path).read_text().splitlines() if line.startswith("| ")]
        assert methods == set(re.findall(link, "\n".join(lines))), path
    assert [name for name in methods if not (ROOT / f"docs/methods/{name}.svg").exists()] == []
    pages = [*(ROOT / "docs/optimizers").glob("*.md")]
    assert {"muon", "soap", "shampoo"} <= {page.stem for page in pages}
    assert [page.name for page in pages if not page.with_suffix(".svg").exists()] == []


def test_the_reading_order_names_files_that_exist() -> None:
    files = re.findall(r"`((?:dlctl|daemons|tests)/[\w/]+\.py)`", dlctl.__doc__ or "")
    assert len(files) >= 10
    assert [path for path in files if not (ROOT / path).exists()] == []


def test_the_short_documents_stay_short() -> None:
    sizes = {name: (ROOT / name).stat().st_size for name in LIMITS}
    assert {name: size for name, size in sizes.items() if size > LIMITS[name]} == {}


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("examples/*/*.toml")), ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_every_example_is_a_valid_job(path: Path) -> None:
    assert jobfile.load(path).workers.count >= 1


def test_every_job_file_in_the_documents_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the packages that it needs."""
    monkeypatch.setattr(extras, "is_there", lambda _: True)
    blocks = [
        (text, block)
        for text in TEXTS
        for block in re.findall(r"```toml\n(.*?)```", text.read_text(), re.S)
    ]
    (tmp_path / "train.py").write_text("task = None\n")
    (tmp_path / "task.py").write_text("task = None\n")
    whole = "[job]\nname = 'whole'\ntask = 'train.py:task'\n"
    assert len(blocks) >= 6
    for text, block in blocks:
        (tmp_path / "job.toml").write_text(block if "[job]" in block else whole + block)
        assert jobfile.load(tmp_path / "job.toml").job.name, named(text)
