"""From a path to a document of plain values; faults of the file itself."""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from dlctl.jobfile.faults import UNREADABLE, Fault, JobFileError, JobFileProblem, locate
from dlctl.jobfile.positions import KeyPath, Spot, TextPlace
from dlctl.util import regular
from dlctl.util.regular import NotRegular

SIZE_MAX_BYTES = 1_000_000
DEPTH_MAX = 16
INTEGER_MAX = 2**63 - 1
DOTS_MAX = 100
"""Dots in one line. `tomllib` needs seconds for a key of ten thousand parts."""
_TOML_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def read(path: Path) -> str:
    """The text of a job file. Raises JobFileError if it cannot be read."""
    try:
        with regular.opened(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes > SIZE_MAX_BYTES:
                size = f"{size_bytes} bytes; a job file has at most {SIZE_MAX_BYTES}"
                raise _unreadable(path, f"has {size}")
            data = file.read(SIZE_MAX_BYTES)
    except FileNotFoundError:
        raise _unreadable(path, "does not exist", _similar_file(path)) from None
    except NotRegular as error:
        meant = _job_files_in(path) if path.is_dir() else ""
        raise _unreadable(path, f"is {error.kind}, not a regular file", meant) from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or str(error)) from error
    if not data.strip():
        raise _unreadable(path, "is empty", "dlctl init writes one to begin with")
    return _decode(path, data)


def _decode(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"is not UTF-8: byte 0x{data[error.start]:02x}"
        raise JobFileError(
            path, [JobFileProblem(str(path), "", message, line=line)], UNREADABLE
        ) from None


def parse(path: Path, text: str) -> dict[str, Any]:
    """The document of a TOML text. Raises JobFileError with the line of a syntax error."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > DOTS_MAX and not line.lstrip().startswith("#"):
            raise _syntax_error(path, text, f"more than {DOTS_MAX} dots in a line", number, 1)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise _syntax_error(path, text, "is nested too deeply", None, 1) from None
    except ValueError as error:
        message, at_line, column = _place_of(str(error), text)
        raise _syntax_error(path, text, message, at_line, column) from None


def _place_of(message: str, text: str) -> tuple[str, int | None, int]:
    """A message of tomllib without the place at its end, and the place: line and column from 1."""
    found = _TOML_PLACE.search(message)
    if not found:
        return message, None, 1
    lines = text.rstrip("\n").split("\n")
    line = int(found[1] or len(lines))
    column = int(found[2] or len(lines[-1]) + 1)
    return message[: found.start()], line, column


def _syntax_error(
    path: Path, text: str, message: str, line: int | None, column: int
) -> JobFileError:
    message = message[:1].lower() + message[1:]
    if line is None:
        return JobFileError(
            path, [JobFileProblem(str(path), "", message)], "job file is not valid TOML"
        )
    key: KeyPath = ("",)
    keys = {key: Spot(TextPlace(line, column - 1, column))}
    problems = locate(path, text, keys, [Fault(key, message)])
    return JobFileError(path, problems, "job file is not valid TOML")


def _unreadable(path: Path, message: str, suggestion: str = "") -> JobFileError:
    return JobFileError(path, [JobFileProblem(str(path), "", message, suggestion)], UNREADABLE)


def _similar_file(path: Path) -> str:
    try:
        beside = [file.name for file in path.parent.iterdir() if file.suffix == ".toml"]
    except OSError:
        return "dlctl init writes one to begin with"
    close = difflib.get_close_matches(path.name, beside, n=1)
    if not close:
        return "dlctl init writes one to begin with"
    return f'did you mean "{path.parent / close[0]}"?'


def _job_files_in(directory: Path) -> str:
    files = sorted(directory.glob("*.toml"))
    return f'did you mean "{files[0]}"?' if files else ""


def remove_foreign(document: dict[str, Any]) -> list[Fault]:
    """Remove values that no job file may have: dates, NaN, infinity, very deep tables, and
    whole numbers of more than 64 bits."""
    faults: list[Fault] = []
    pending: list[tuple[KeyPath, Any]] = [((), document)]
    while pending:
        path, container = pending.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in list(items):
            here = (*path, key)
            if isinstance(value, dict | list) and len(here) < DEPTH_MAX:
                pending.append((here, value))
            elif message := _foreign(value):
                faults.append(Fault(here, message))
                container[key] = None
                if isinstance(container, dict):
                    del container[key]
    return faults


def _foreign(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"is nested more than {DEPTH_MAX} levels deep"
    if isinstance(value, float) and not math.isfinite(value):
        return f"must be a finite number (got {value})"
    if isinstance(value, int) and not -INTEGER_MAX - 1 <= value <= INTEGER_MAX:
        return "must fit into 64 bits"
    if not isinstance(value, str | int | float):
        return f"must not be a date or time (got {value})"
    return ""
