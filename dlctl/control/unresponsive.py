"""A coordinator that does not answer: when it is replaced, and how to continue without a loss.

If its process exists but is unresponsive, its agent kills and restarts it after a timeout. A user
who does not want to wait can kill it: all that it has done is on record.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dlctl.errors import Unreachable
from dlctl.runs import paths
from dlctl.util import hints, processes, regular

STILL_S = 5.0
"""A working coordinator touches its lock more often than this."""


class Way(NamedTuple):
    command: str
    what: str
    """The effect of the command, as the rest of a sentence that begins with it."""


def way(directory: Path, run: Mapping[str, Any]) -> Way:
    """What to do instead of waiting; `run` as in `dlctl.runs.database.read`."""
    kill = f"kill -9 {run.get('pid')}"
    if not has_agent(run["daemons"]):
        return Way(f"{kill}; dlctl recover -j {directory.name}", "starts another one")
    what = "makes its agent start another one at once, which continues"
    if _has_written(directory, run):
        return Way(kill, f"{what} where it was: nothing is lost")
    return Way(kill, f"{what} from what this one could still write")


def _has_written(directory: Path, run: Mapping[str, Any]) -> bool:
    """Whether the coordinator could write its records as long as it worked."""
    now, written_at = time.time(), run.get("updated_at")
    beat_age_s = paths.beat_age_s(directory, now)
    if beat_age_s is None or not isinstance(written_at, int | float):
        return True
    return now - written_at - beat_age_s < STILL_S


def replaced(limit_s: float) -> str:
    return f"it is replaced after {limit_s:g} s without a heartbeat"


def limit_s(directory: Path) -> float:
    """The heartbeat timeout after which a process of this run is replaced."""
    try:
        found = json.loads(regular.read_bytes(directory / "job.json"))["timeouts"]["silent_s"]
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    if type(found) is int or type(found) is float:
        return float(found)
    from dlctl.job import config  # only here: it takes pydantic along

    return config.Timeouts().silent_s


def has_agent(daemons: Iterable[Mapping[str, Any]]) -> bool:
    """Whether an agent is alive that restarts the coordinator."""
    return bool(processes.working(row for row in daemons if row.get("role") == "agent"))


def mute(directory: Path, run: Mapping[str, Any], lasts: str, where: str) -> Unreachable:
    """The error for a coordinator whose process exists but does not answer for, say, "15s"; `run`
    as in `dlctl.runs.database.read`.
    """
    run_id, pid = directory.name, run.get("pid")
    beat_age_s = paths.beat_age_s(directory, time.time())
    if beat_age_s is not None and beat_age_s < STILL_S:  # It works: killing it would not help.
        hint = hints.either(f"dlctl status -j {run_id}", f"dlctl logs coordinator -j {run_id}")
    else:
        hint = hints.command(*way(directory, run))
        if has_agent(run["daemons"]):
            hint += f"; else {replaced(paths.STILL_LIMITS * limit_s(directory))}"
    return Unreachable(
        f"the coordinator of {run_id} is alive (pid {pid or 'unknown'}) but does not answer for "
        f"{lasts}",
        where=where,
        hint=hint,
    )
