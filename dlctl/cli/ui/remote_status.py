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
from dlctl.runs import facts
from dlctl.util import values

SCHEMA = "dlctl.status-from/1"
HEADERS = ("NAME", "STATE", "PHASE", "WAITS FOR", "HOST", "RST")
Row = Mapping[str, Any]


def show(file: Path, address: str | None, as_json: bool) -> None:
    """Query once, and print the answer. `address`: "tcp://HOST:PORT", overrides the file's.

    Raises UsageError for a malformed address, Unreachable or NotPermitted.
    """
    key = reader.load(file)
    if address is not None:
        key = key._replace(address=_checked(address))
    found = reader.status(key)
    if as_json:
        console.out_json(SCHEMA, {**found, "asked": key.address})
        return
    console.out(_head(found["run"]))
    console.out(console.table(HEADERS, map(_cells, found["daemons"]), ("RST",)))
    for problem in problems.read(found["run"].get("problems")):
        if codes.level(problem) != "wait":
            console.out(attention.line(problem, time.time()))


def _checked(address: str) -> str:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdecimal():
        raise UsageError(f'"{address:.80}" is not an address', hint="--from tcp://HOST:PORT")
    if not 1 <= int(port) <= 65535:
        raise UsageError(f"there is no port {port:.20}", hint="--from tcp://HOST:PORT")
    return address


def _head(run: Row) -> str:
    parts = [
        console.style(console.escape(facts.text(run.get("run_id"))), bold=True),
        report.state(run.get("state")),
        f"step {values.count(run.get('step'))}",
        f"epoch {values.fixed(run.get('data_epoch'), 2)}",
        f"loss {values.decimal(run.get('loss'))}",
        f"{values.fixed(run.get('samples_per_s'), 0)} samples/s",
    ]
    updated_at = values.number(run.get("updated_at"))
    if updated_at is not None:
        parts.append(f"{values.duration(max(0.0, time.time() - updated_at))} ago")
    return "  ".join(parts)


def _cells(row: Row) -> tuple[str, ...]:
    texts = (row.get(key) for key in ("name", "state", "phase", "waiting_for", "host"))
    shown = (console.escape(str(text or "-")) for text in texts)
    return (*shown, values.count(row.get("restarts")))
