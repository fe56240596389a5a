"""Whole screens, compared with files that a person has read: `golden/NAME.txt` beside the test.

    pytest tests/cli/test_status.py --update-golden    # writes them; read the diff before you commit

Only what differs from run to run is replaced: directories of the test, pids, the four digits of a
run's id. Columns are two spaces apart, because their width depends on the pids.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import unified_diff
from pathlib import Path

UPDATE = "--update-golden"
VOLATILE = (
    (re.compile(r"\bpid \d+"), "pid PID"),
    (re.compile(r"\bkill -9 \d+"), "kill -9 PID"),
    (re.compile(r"(?<=\S) {2,}(?=\S)"), "  "),
    (re.compile(r" +$", re.MULTILINE), ""),
)


def may_update(is_asked: bool) -> bool:
    """A run of CI compares and never writes."""
    assert not (is_asked and os.environ.get("CI")), f"{UPDATE} is not for CI"
    return is_asked


class Golden:
    """`golden("status", out)` fails with a diff unless `out` is what the file has."""

    def __init__(self, folder: Path, *, is_updated: bool, names: Mapping[str, str]) -> None:
        """`names`: what differs from run to run, and what stands for it in the files."""
        self.folder = folder
        self.is_updated = is_updated
        self.names = dict(names)

    def __call__(self, name: str, text: str, names: Mapping[str, str] | None = None) -> None:
        file = self.folder / f"{name}.txt"
        shown = self._normalised(text, self.names | dict(names or {}))
        if self.is_updated:
            self.folder.mkdir(exist_ok=True)
            file.write_text(shown, encoding="utf-8")
        expected = file.read_text(encoding="utf-8") if file.exists() else ""
        lines = [each.splitlines(keepends=True) for each in (expected, shown)]
        diff = "".join(unified_diff(*lines, str(file), "shown now"))
        assert not diff, f"{diff}\nif this is right, run the test with {UPDATE}"
        assert file.exists(), f"{file} is missing: run the test with {UPDATE}"

    @staticmethod
    def _normalised(text: str, names: Mapping[str, str]) -> str:
        for name in sorted(names, key=len, reverse=True):
            text = text.replace(name, names[name])
        for pattern, word in VOLATILE:
            text = pattern.sub(word, text)
        return text if text.endswith("\n") or not text else f"{text}\n"
