"""What to do about a run that has failed because nobody could use what its workers computed.

Where it stopped its model may be ruined, as by a rate that was far too large: whoever goes on there
fails again. So it goes back to what was saved before, and what was set live is told.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from dlctl.cli import nextstep, report, values
from dlctl.cli.nextstep import Step
from dlctl.cli.snapshot import Snapshot, newest_whole
from dlctl.errors import DlctlError
from dlctl.runs import checkpoints, preferred
from dlctl.runs.database import RunDb
from dlctl.runs.manifest import has_updates, is_doubtful
from dlctl.settings import EVERY_RUN
from dlctl.util import hints
from dlctl.util.text import is_poisoned

RUINED = "the model may be ruined where it stopped"
RATES = {"lr", "inner_lr"}
"""What ruins a model if it is too large."""
Json = dict[str, Any]


def has_failed(snapshot: Snapshot) -> bool:
    return snapshot.state == "failed" and is_poisoned(snapshot.reason)


def has_way_back(snapshot: Snapshot) -> bool:
    """Whether it failed so, and there is a checkpoint of before that."""
    found = newest_whole(snapshot.directory) if has_failed(snapshot) else None
    return found is not None and has_updates(found[1]) and not is_doubtful(found[1])


def step(snapshot: Snapshot) -> Step:
    """The next one, of a run that has failed so: a way that works."""
    found, anew = newest_whole(snapshot.directory), f"dlctl start --fresh {_job_file(snapshot)}"
    first = _first(snapshot)
    if found is None or not has_updates(found[1]):
        return Step(anew, f"begins anew: {RUINED}, and there is no checkpoint", first)
    live = set_live(snapshot)
    forgets = f"; {live}: that is forgotten" if live else ""
    price = f"checkpoint {_named(found[1])}{report.done_again(snapshot)}{forgets}"
    if is_doubtful(found[1]):
        what = f"goes on from {price}; the model may be ruined there: if it fails again, begin anew"
        return Step(_command(snapshot), what, first, anew)
    further = _further(snapshot, found[0])
    return Step(_command(snapshot), f"goes back to {price}; {RUINED}", first, further)


def _further(snapshot: Snapshot, path: Path) -> str:
    """How to go back further than to `path`, if the run came from there and has failed again: the
    model may have been ruined before that was saved. "" if it did not, or nothing older is whole.
    """
    if Path(str(snapshot.run.get("resume") or "")).name != path.name:
        return ""
    for older in preferred.order(snapshot.directory):
        is_older = checkpoints.number(older) < checkpoints.number(path)
        if is_older and not checkpoints.verify(older, hashes=False):
            made = checkpoints.read_manifest(older)
            back = f"dlctl recover -j {snapshot.run_id} --checkpoint {made['number']}"
            return hints.told(back, f"goes back further, to checkpoint {_named(made)}")
    return ""


def _first(snapshot: Snapshot) -> str:
    """What has to be done before; a rate that was set live is forgotten without that."""
    if _live(snapshot).keys() & RATES:
        return ""
    return f"correct the data or the task, or lower lr in {_job_file(snapshot)},"


def _command(snapshot: Snapshot) -> str:
    """`start` takes a job file that has been changed; without any need for that, `recover` does."""
    if _live(snapshot).keys() & RATES or not isinstance(snapshot.run.get("job_file"), str):
        return f"dlctl recover -j {snapshot.run_id} --from-checkpoint"
    return f"dlctl start {_job_file(snapshot)}"


def _job_file(snapshot: Snapshot) -> str:
    return nextstep.job_file(snapshot)


def _named(manifest: Mapping[str, Any]) -> str:
    """As in "1 (step 7,664, accuracy 0.9778)"."""
    metrics, step = manifest["evaluation"], manifest["step"]
    parts = [f"step {values.count(step)}"]
    parts += [values.evaluation_at(metrics, step)] if metrics else []
    return f"{manifest['number']} ({', '.join(parts)})"


# ---------------------------------------------------------------- what was set live


def set_live(snapshot: Snapshot) -> str:
    """What was set live and is still remembered, as in "lr=100000.0 was set live 3s before the
    end"; "" if nothing is.
    """
    live = _live(snapshot)
    if not live:
        return ""
    shown = " ".join(f"{key}={EVERY_RUN.format(key, value)}" for key, value in live.items())
    shown += " was set live"
    changed_at, ended_at = _changed_at(snapshot, live), values.number(snapshot.run.get("ended_at"))
    if changed_at is None or ended_at is None or changed_at > ended_at:
        return shown
    return f"{shown} {values.duration(ended_at - changed_at)} before the end"


def _live(snapshot: Snapshot) -> Json:
    """What the next coordinator puts in force again, unless it begins from a checkpoint."""
    found: Json = {}
    try:
        with closing(RunDb(snapshot.directory, readonly=True)) as db:
            rows = [row for key, row in db.memory().items() if key.startswith("daemon/")]
    except (DlctlError, sqlite3.Error, ValueError):
        return found
    for row in rows:
        found |= row.get("settings") or {}
    return found


def _changed_at(snapshot: Snapshot, live: Json) -> float | None:
    """When one of these was set last; None if nobody knows."""
    try:
        with closing(RunDb(snapshot.directory, readonly=True)) as db:
            events = list(db.events(kind="set"))
    except (DlctlError, sqlite3.Error, ValueError):
        return None
    words = [f" {key}=" for key in live]
    times = [row["at"] for row in events if any(word in str(row["text"]) for word in words)]
    return max(times, default=None)
