"""`dlctl status --key FILE`: the status of another user's run, queried from its coordinator."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlctl import problems
from dlctl.cli.ui import attention, console, report
from dlctl.control import reader
from dlctl.errors import UsageError
from dlctl.ops import codes
from dlctl.util import values

SCHEMA = "dlctl.status-from/1"
Row = Mapping[str, Any]
COLUMNS: console.Columns[Row] = {
    "NAME": lambda row: str(row.get("name")),
    "STATE": lambda row: str(row.get("state")),
    "PHASE": lambda row: str(row.get("phase") or values.NOTHING),
    "WAITS FOR": lambda row: str(row.get("waiting_for") or values.NOTHING),
    "HOST": lambda row: str(row.get("host") or values.NOTHING),
    ">RST": lambda row: values.count(row.get("restarts")),
}


def show(file: Path, address: str | None) -> None:
    """Query once, and print the answer. `address`: "tcp://HOST:PORT", overrides the file's.

    Raises UsageError for a malformed address, Unreachable or NotPermitted.
    """
    key = reader.load(file)
    if address is not None:
        key = key._replace(address=_checked(address))
    found = reader.status(key)
    ill = [p for p in problems.read(found["run"].get("problems")) if codes.level(p) != "wait"]
    lines = [_head(found["run"]), console.table(COLUMNS, found["daemons"])]
    lines += [attention.line(problem, time.time()) for problem in ill]
    console.show(SCHEMA, {**found, "asked": key.address}, "\n".join(lines))


def _checked(address: str) -> str:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    is_port = port.isdecimal() and 1 <= int(port) <= 65535
    if not address.startswith("tcp://") or not host or not is_port:
        raise UsageError(f'"{address:.80}" is not an address', hint="--from tcp://HOST:PORT")
    return address


def _head(run: Row) -> str:
    parts = [
        console.style(str(run.get("run_id") or ""), bold=True),
        report.state(run.get("state")),
        *report.figures(run),
        f"{values.fixed(run.get('samples_per_s'), 0)} samples/s",
    ]
    updated_at = values.number(run.get("updated_at"))
    if updated_at is not None:
        parts.append(f"{values.duration(max(0.0, time.time() - updated_at))} ago")
    return "  ".join(parts)
