"""Whole screens, compared with files that a person has read: `golden/NAME.txt` beside the test.

    pytest tests/cli/test_status_command.py --update-golden    # writes them: read the diff then

Only what differs from run to run is replaced: directories of the test, pids, times of day, the four
digits of a started run's id. Lines of progress are left out. Columns of tables are two spaces
apart, for their width depends on the pids.
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
    (re.compile(r"^((?:coordinator|agent-\d+|server-\d+|worker-\d+) +)\d+(?= )"), r"\1PID"),
    (re.compile(r"\b\d\d:\d\d:\d\d\.\d{3}\b"), "TIME"),
    (re.compile(r"\brunning after [\d.]+m?s\b"), "running after TIME"),
    (re.compile(r"\bquick-[0-9a-f]{4}\b"), "quick-RUN"),
    (re.compile(r" +$"), ""),
)
PROGRESS = re.compile(r"(pending|starting|recovering)  .*\d+m?s$")
"""How often a wait is told depends on the machine."""
TABLE = re.compile(r"[\w-]+  .*")


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

    def __call__(self, name: str, text: str) -> None:
        file = self.folder / f"{name}.txt"
        shown = self._normalised(text)
        if self.is_updated:
            self.folder.mkdir(exist_ok=True)
            file.write_text(shown, encoding="utf-8")
        expected = file.read_text(encoding="utf-8") if file.exists() else ""
        lines = [each.splitlines(keepends=True) for each in (expected, shown)]
        diff = "".join(unified_diff(*lines, str(file), "shown now"))
        assert not diff, f"{diff}\nif this is right, run the test with {UPDATE}"
        assert file.exists(), f"{file} is missing: run the test with {UPDATE}"

    def _normalised(self, text: str) -> str:
        for name in sorted(self.names, key=len, reverse=True):
            text = text.replace(name, self.names[name])
        lines = [line for line in text.splitlines() if not PROGRESS.match(line)]
        return "".join(f"{_without_volatile(line)}\n" for line in lines)


def _without_volatile(line: str) -> str:
    for pattern, word in VOLATILE:
        line = pattern.sub(word, line)
    return re.sub(" {2,}", "  ", line) if TABLE.match(line) else line
