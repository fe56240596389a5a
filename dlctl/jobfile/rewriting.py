"""Other values for keys of a job file. All else of its text stays: comments, order, spaces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dlctl.errors import UsageError
from dlctl.jobfile.positions import find_keys


def rewritten(text: str, changes: Mapping[str, Any]) -> str:
    """The text with these values; a key that is not there yet is added below the header of its
    table, or in its braces, or in a new table at the end. Raises UsageError for a value over
    several lines.
    """
    for dotted, value in changes.items():
        text = _with(text, tuple(dotted.split(".")), _written(value))
    return text


def retabled(text: str, tables: Mapping[str, Mapping[str, Any] | None]) -> str:
    """The text with these tables in place of those of the same name, or at its end; None: without
    the table. Comments within a replaced table are lost. Raises UsageError for a table that is
    written in another way than below a header of its own.
    """
    for name, values in tables.items():
        text = _retabled(text, name, values)
    return text


def _retabled(text: str, name: str, values: Mapping[str, Any] | None) -> str:
    lines, keys = text.split("\n"), find_keys(text)
    headers = sorted(
        (spot.key.line - 1, path)
        for path, spot in keys.items()
        if spot.value is None and lines[spot.key.line - 1].lstrip()[:1] == "["
    )
    own = [index for index, (_, path) in enumerate(headers) if path[0] == name]
    if (name,) in keys and not own:
        raise UsageError(f"{name} is no table of its own in the job file: change it there")
    at = len(lines)
    for index in reversed(own):
        at = headers[index][0]
        end = headers[index + 1][0] if index + 1 < len(headers) else len(lines)
        while index + 1 < len(headers) and lines[end - 1].strip()[:1] in ("", "#") and end > at + 1:
            end -= 1  # A comment above the next header belongs to that.
        del lines[at:end]
    if values is not None:
        made = [f"[{name}]", *(f"{key} = {_written(value)}" for key, value in values.items())]
        lines[at:at] = made if own else [*([""] if lines[-1:] != [""] else []), *made, ""]
    return "\n".join(lines)


def _with(text: str, path: tuple[str, ...], value: str) -> str:
    lines, keys = text.split("\n"), find_keys(text)
    spot = keys.get(path)
    if spot is not None and spot.value is not None:
        line = lines[spot.value.line - 1]
        end = spot.value.end
        if line[spot.value.start] in "[{" or line[spot.value.start : spot.value.start + 3] in _LONG:
            raise UsageError(f"{'.'.join(path)} is no plain value in the job file: change it there")
        lines[spot.value.line - 1] = line[: spot.value.start] + value + line[end:]
        return "\n".join(lines)
    table = keys.get(path[:-1])
    if table is not None and table.value is None and lines[table.key.line - 1].lstrip()[:1] == "[":
        lines.insert(table.key.line, f"{path[-1]} = {value}")
        return "\n".join(lines)
    if table is not None and table.value is not None:
        place = table.value
        line = lines[place.line - 1]
        if line[place.start] == "{":
            after = line[place.end :].lstrip()
            rest = f" {after}" if after.startswith("}") else f", {after}"
            lines[place.line - 1] = f"{line[: place.end]} {path[-1]} = {value}{rest}"
            return "\n".join(lines)
    if table is not None:
        raise UsageError(f"{'.'.join(path[:-1])} is no table of its own in the job file")
    return f"{text.rstrip()}\n\n[{'.'.join(path[:-1])}]\n{path[-1]} = {value}\n"


_LONG = ('"""', "'" * 3)


def _written(value: Any) -> str:
    """A plain value in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    return json.dumps(str(value), ensure_ascii=False)
