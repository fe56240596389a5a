"""Who of a run that has died is gone, and what is known of how: `dlctl recover` begins with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlctl.cli import logfiles, report, values
from dlctl.cli.snapshot import ENDED, Snapshot, is_here
from dlctl.util.text import grave

LAST_LINES = 3
WITHOUT_A_WORD = "its log says nothing of it, as after SIGKILL or a power failure"


def of(snapshot: Snapshot, living: list[str], *, is_there: bool, is_led: bool) -> list[str]:
    """Who is gone, and what is known of how; a line each, last words below. `is_there`, `is_led`:
    of the coordinator, see `recovery`.
    """
    lines = []
    if snapshot.run.get("state") == "failed" and snapshot.reason:
        lines.append(f"the run has failed: {snapshot.reason}")
    if not is_led and snapshot.run.get("state") not in ENDED:
        lines += _coordinator_end(snapshot, is_there=is_there)
    for row in snapshot.daemons:
        if row["name"] not in living:
            lines += _end_of(snapshot, row)
    return lines


def _coordinator_end(snapshot: Snapshot, *, is_there: bool) -> list[str]:
    if snapshot.run.get("pid") is None:
        return []
    heard = values.ago(snapshot.run.get("updated_at"), snapshot.now)
    if is_there:
        since = values.number(snapshot.run.get("updated_at"))
        failed = logfiles.ends_at_once(snapshot.directory, "coordinator", since)
        starts = f"coordinator: it is being started (pid {snapshot.run['pid']}, last heard {heard})"
        return [starts, *([f"  | {failed}"] if failed else [])]
    gone = f"coordinator: gone (pid {snapshot.run['pid']}, last heard {heard})"
    words = _troubles(snapshot.directory, "coordinator")
    return [gone if words else f"{gone}; {WITHOUT_A_WORD}", *words]


def _troubles(directory: Path, name: str) -> list[str]:
    """What the last lines of a daemon's newest log say of any trouble."""
    files = logfiles.list_files(directory).get(name, [])
    newest = [file for file in files if file.incarnation == files[-1].incarnation]
    lines = logfiles.tail(newest, LAST_LINES * 4)
    grave = [line.text for line in lines if line.severity >= logfiles.LEVELS.index("warning")]
    return [f"  | {text}" for text in grave[-LAST_LINES:]]


def _end_of(snapshot: Snapshot, row: Mapping[str, Any]) -> list[str]:
    """Of one that is not known to live."""
    last, name = row.get("last_exit"), str(row["name"])
    if is_here(row) and row.get("pid") is not None:
        return [f"{name}: gone (pid {row['pid']})"]
    if not isinstance(last, Mapping) or not last.get("code"):
        return []
    words = last.get("last_lines")
    lines = _grave([str(word) for word in words] if isinstance(words, list) else [])
    return [f"{name}: {report.exited(last)} {values.ago(last.get('at'), snapshot.now)}", *lines]


def _grave(lines: list[str]) -> list[str]:
    """The last lines that say more than that all is well."""
    return [f"  | {line}" for line in grave(lines)[-LAST_LINES:]]
