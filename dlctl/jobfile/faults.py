"""Faults of a job file with their positions, and how they are shown."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dlctl.errors import UsageError
from dlctl.jobfile.positions import KeyPath, Spot, TextPlace
from dlctl.util.redact import redacted
from dlctl.util.text import escape

UNREADABLE = "cannot read the job file"
SHOWN_MAX = 50
TEXT_MAX = 500
"""Characters of a key or a message that are shown: both may contain text of the file."""
WIDTH_MAX = 100
"""Columns of a source line that are shown."""


class Fault(NamedTuple):
    """An error in the value of a key, or in the key itself."""

    path: KeyPath
    message: str
    suggestion: str = ""
    """A suggestion: 'did you mean "x"?'."""
    at_key: bool = False
    """Point at the key, not at its value."""


@dataclass(frozen=True, slots=True)
class JobFileProblem:
    """A fault and its position. Lines count from 1, columns from 0; None: not in the file."""

    file: str
    key: str
    message: str
    suggestion: str = ""
    line: int | None = None
    column: int = 0
    width: int = 0
    source: str = ""
    """The line itself."""

    def to_dict(self) -> dict[str, Any]:
        """The problem as a JSON object: all but the drawing."""
        return {k: v for k, v in asdict(self).items() if k not in ("width", "source")}


class JobFileError(UsageError):
    """A job file that cannot be used. `problems` has all of its faults."""

    def __init__(
        self, path: Path, problems: Iterable[JobFileProblem], title: str = "job file is not valid"
    ) -> None:
        self.problems = sorted(problems, key=lambda p: (p.line or 0, p.column))
        super().__init__(_render(title, str(path), self.problems))


def locate(
    path: Path, text: str, keys: Mapping[KeyPath, Spot], faults: Iterable[Fault]
) -> list[JobFileProblem]:
    """Faults with their places; of several with one key, only the first."""
    lines = text.split("\n")
    unique: dict[KeyPath, Fault] = {}
    for fault in faults:
        unique.setdefault(fault.path, fault)
    return [_locate(str(path), lines, keys, fault) for fault in unique.values()]


def _locate(
    file: str, lines: list[str], keys: Mapping[KeyPath, Spot], fault: Fault
) -> JobFileProblem:
    place = _place(keys, fault)
    dotted = ".".join(str(part) for part in fault.path)
    if place is None:
        return JobFileProblem(file, dotted, fault.message, fault.suggestion)
    line = lines[place.line - 1].removesuffix("\r")
    source = redacted(line)
    width = max(1, min(place.end, len(line)) - place.start - len(line) + len(source))
    return JobFileProblem(
        file, dotted, fault.message, fault.suggestion, place.line, place.start, width, source
    )


def _place(keys: Mapping[KeyPath, Spot], fault: Fault) -> TextPlace | None:
    """The position of the faulty key, or of the nearest table around it that the file has."""
    for length in range(len(fault.path), 0, -1):
        spot = keys.get(fault.path[:length])
        if spot is not None:
            whole = length == len(fault.path)
            return spot.value if whole and spot.value and not fault.at_key else spot.key
    return None


def _render(title: str, file: str, problems: list[JobFileProblem]) -> str:
    shown = problems[:SHOWN_MAX]
    gutter = max((len(str(p.line)) for p in shown if p.line), default=2)
    lines = [title]
    for problem in shown:
        lines += _render_one(problem, gutter)
    if len(problems) > len(shown):
        lines.append(f"  ... and {len(problems) - len(shown)} more")
    if title == UNREADABLE:
        return "\n".join(lines)
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines.append(f"{count}. Check again with: dlctl validate {shlex.quote(file)}")
    return "\n".join(lines)


def _render_one(problem: JobFileProblem, gutter: int) -> list[str]:
    texts = [problem.message[:TEXT_MAX], problem.suggestion[:TEXT_MAX]]
    message = escape("; ".join(filter(None, texts)))
    where = escape(problem.file) + (f":{problem.line}" if problem.line else "")
    head = f"  --> {where}   {escape(problem.key[:TEXT_MAX])}".rstrip()
    bar = " " * gutter + " |"
    if not problem.line or not problem.source.strip():
        return [head, f"{bar} {message}"]
    before, marked = _excerpt(problem)
    source = f"{problem.line:>{gutter}} | {before}"
    return [head, bar, source, f"{bar} {marked} {message}"]


def _excerpt(problem: JobFileProblem) -> tuple[str, str]:
    """The source line, harmless and not too long, and the carets below it."""
    start = problem.column - WIDTH_MAX // 2 if problem.column > WIDTH_MAX * 3 // 4 else 0
    end = start + WIDTH_MAX
    stop = min(problem.column + problem.width, end)
    before = ("..." if start else "") + escape(problem.source[start : problem.column])
    marked = escape(problem.source[problem.column : stop])
    after = escape(problem.source[stop:end]) + ("..." if len(problem.source) > end else "")
    return before + marked + after, " " * len(before) + "^" * max(1, len(marked))
