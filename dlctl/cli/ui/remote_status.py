"""`dlctl status --key FILE`: the status of another user's run, queried from its coordinator."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlctl import problems
from dlctl.cli.ui import attention, console, report
from dlctl.control import reader
from dlctl.errors import UsageError
from dlctl.ops import problem_texts
from dlctl.util import values

SCHEMA = "dlctl.status-from/1"
Row = Mapping[str, Any]
COLUMNS = ("name", "state", "phase", "waiting_for", "host", "restarts")
ADDRESS = re.compile(r"tcp://.+:([0-9]{1,5})")


def show(file: Path, address: str | None) -> None:
    """Query once, and print the answer. `address`: "tcp://HOST:PORT", overrides the file's.

    Raises UsageError for a malformed address, Unreachable or NotPermitted.
    """
    key = reader.load(file)
    if address is not None:
        found = ADDRESS.fullmatch(address)
        if found is None or not 1 <= int(found[1]) <= 65535:
            raise UsageError(f'"{address:.80}" is not an address', hint="--from tcp://HOST:PORT")
        key = key._replace(address=address)
    answer = reader.status(key)
    ill = [
        p for p in problems.read(answer["run"].get("problems")) if problem_texts.level(p) != "wait"
    ]
    rows = ({name: row.get(name) for name in COLUMNS} for row in answer["daemons"])
    cells = ({k.upper(): None if v == "" else v for k, v in row.items()} for row in rows)
    lines = [_head(answer["run"]), console.table(cells)]
    lines += [attention.line(problem, time.time()) for problem in ill]
    console.show(SCHEMA, {**answer, "asked": key.address}, "\n".join(lines))


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
