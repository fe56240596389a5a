"""`dlctl status --key FILE`: how a run of somebody else is doing, asked of its coordinator."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlctl import reader
from dlctl.cli import console, report, values
from dlctl.errors import DlctlError, UsageError

SCHEMA = "dlctl.status-from/1"
HEADERS = ("NAME", "STATE", "PHASE", "WAITS FOR", "HOST", "RST")
Row = Mapping[str, Any]


def show(file: Path, address: str | None, as_json: bool) -> None:
    """Ask once, and print the answer. `address`: "tcp://HOST:PORT", if it is not the file's.

    Raises UsageError for anything else, Unreachable or NotPermitted.
    """
    key = reader.load(file)
    if address is not None:
        key = key._replace(address=_checked(address))
    found = reader.status(key)
    if as_json:
        console.out_json(SCHEMA, {**found, "asked": key.address})
        return
    console.out("\n".join([_head(found["run"]), *_table(found["daemons"])]))


def _checked(address: str) -> str:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdecimal():
        raise UsageError(f'"{address:.80}" is no address', hint="--from tcp://HOST:PORT")
    if not 1 <= int(port) <= 65535:
        raise UsageError(f"there is no port {port:.20}", hint="--from tcp://HOST:PORT")
    return address


def _head(run: Row) -> str:
    parts = [
        console.style(console.escape(report.text(run.get("run_id"))), bold=True),
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


def _table(rows: list[Row]) -> list[str]:
    cells = [HEADERS, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADERS))]
    return ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]


def _cells(row: Row) -> tuple[str, ...]:
    texts = (row.get(key) for key in ("name", "state", "phase", "waiting_for", "host"))
    shown = (console.escape(str(text or "-")) for text in texts)
    return (*shown, values.count(row.get("restarts")))


def write_key(snapshot: Any, file: Path) -> reader.ReaderKey:
    """Write a reader's key for a run of ours. Raises DlctlError if its connections have none."""
    from dlctl import keys, runs
    from dlctl.cli.launching import explained
    from dlctl.roles.doors import READER

    run = snapshot.run
    coordinator, address = run.get("control_key"), run.get("control")
    if not coordinator or not isinstance(address, str):
        raise DlctlError(
            f"the connections of {snapshot.run_id} have no keys: only you can reach it",
            where=str(snapshot.directory),
            hint='transport = "tcp" in [network]; then a coordinator has to be there',
        )
    secret = keys.CurveKeys(keys.read(snapshot.directory)).secret(READER)
    made = reader.ReaderKey(snapshot.run_id, address, coordinator, secret)
    with explained(file):
        runs.write(file, made.to_bytes(), 0o600)
    return made
