"""Golden files: a difference fails, only an update writes, and none is left without its test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from golden import Golden, may_update

HERE = Path(__file__).parent
USED = re.compile(r"golden\(\s*f?\"([^\"]+)\"")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Golden(tmp_path, is_updated=True, names={})("screen", "step 1\n")
    return tmp_path


@pytest.mark.parametrize("text", ["step 2\n", "step 1\nmore\n", ""])
def test_a_difference_fails_and_writes_nothing(folder: Path, text: str) -> None:
    with pytest.raises(AssertionError, match="--update-golden"):
        Golden(folder, is_updated=False, names={})("screen", text)
    assert (folder / "screen.txt").read_text() == "step 1\n"


def test_a_file_that_is_missing_fails(folder: Path) -> None:
    with pytest.raises(AssertionError, match="--update-golden"):
        Golden(folder, is_updated=False, names={})("other", "")


def test_only_what_differs_from_run_to_run_is_replaced(folder: Path) -> None:
    names = {"/tmp/x": "HOME", "/tmp/x/runs": "RUNS"}
    Golden(folder, is_updated=True, names=names)("a", "a   pid 7 \n  /tmp/x/runs/1   in /tmp/x 12s")
    assert (folder / "a.txt").read_text() == "a  pid PID\n  RUNS/1   in HOME 12s\n"


def test_ci_never_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    assert may_update(is_asked=True)
    monkeypatch.setenv("CI", "1")
    assert not may_update(is_asked=False)
    with pytest.raises(AssertionError):
        may_update(is_asked=True)


def test_every_file_has_its_test() -> None:
    for folder in HERE.rglob("golden"):
        tests = "".join(path.read_text() for path in folder.parent.glob("test_*.py"))
        patterns = [re.sub(r"\{[^}]*\}", "*", name) for name in USED.findall(tests)]
        unused = [
            p.name for p in folder.iterdir() if not any(p.match(f"{g}.txt") for g in patterns)
        ]
        assert not unused, f"{folder}: no test compares {unused}"
