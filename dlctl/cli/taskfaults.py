"""Faults of the task that dlctl cannot mend: a line that does not come back, and what ends the
process without a word. Which line that is, and what to do then.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlctl.cli import nextstep, otherhosts, report, values
from dlctl.cli.snapshot import Snapshot, read_job
from dlctl.util.text import BLAMED, ENDED_BY_ITSELF, bounded_place

Row = Mapping[str, Any]


def is_stuck(row: Row) -> bool:
    """Whether a worker says itself that it has been in one batch for too long."""
    return "stuck_s" in report.metrics(row)


def place(row: Row) -> str:
    """The line of the task that it is stuck in, as in "train.py:51"; "" if that is not known."""
    found = report.metrics(row).get("stuck_at")
    if not is_stuck(row) or not isinstance(found, str) or not found:
        return ""
    file, colon, line = bounded_place(found).rpartition(":")
    return f"{values.path(file)}{colon}{line}" if file else line


def long_s(row: Row) -> float | None:
    """For how long it has been in a batch that takes longer than usual, which is no fault yet."""
    return values.number(report.metrics(row).get("in_batch_s"))


def in_long_batches(snapshot: Snapshot) -> list[Row]:
    """The workers in such batches."""
    return [row for row in snapshot.daemons if long_s(row) is not None]


def step_of_stuck(snapshot: Snapshot, row: Row) -> str:
    """What helps a worker that is stuck. If others are at the same line, or there are no others, it
    is the line that has to be corrected: the next processes would come to it, too.
    """
    where, workers = place(row), _workers(snapshot)
    names = [str(other["name"]) for other in workers if place(other) == where]
    job = f"-j {snapshot.run_id}"
    if not where or (len(names) < 2 and len(workers) > 1):
        return f"dlctl restart {row['name']} {job}"
    whom = "'worker-*'" if len(names) == len(workers) > 1 else " ".join(names)
    return _after(snapshot, f"see why {where} does not come back, and correct it", whom)


def blame(last: Any) -> str:
    """How often in a row a process has ended like that, and whose doing it is: the rest of a
    sentence about its end, see `byitself.blame`.
    """
    found = last.get("blame") if isinstance(last, Mapping) else None
    return found if isinstance(found, str) else ""


def times(last: Any) -> int:
    """How often in a row processes of this worker have ended by themselves in the same way."""
    number = last.get("in_row") if isinstance(last, Mapping) else None
    return number if type(number) is int else 0


def step_of_ended(snapshot: Snapshot, row: Row) -> str:
    """What to do about a worker whose process the task has ended; "" if that is not what it was."""
    last = row.get("last_exit")
    if BLAMED not in blame(last) or not snapshot.is_live:
        return ""
    names = [
        str(other["name"])
        for other in _workers(snapshot)
        if BLAMED in blame(other.get("last_exit"))
    ]
    whom = "'worker-*'" if len(names) == len(_workers(snapshot)) > 1 else " ".join(names)
    return _after(snapshot, mend(snapshot), whom)


def mend(snapshot: Snapshot) -> str:
    """What has to be done about a task that ends its process."""
    return f"find what ends the process in {_task_file(snapshot)}, and correct it"


def is_ended_by_task(reason: str) -> bool:
    """Whether a run has failed of that."""
    return ENDED_BY_ITSELF in reason or BLAMED in reason


def _after(snapshot: Snapshot, first: str, whom: str) -> str:
    """The next processes on this machine read the task's file anew; other hosts have a copy of it,
    which they get when the run is started.
    """
    if otherhosts.of(snapshot):
        start = f"dlctl start {nextstep.job_file(snapshot)}"
        return f"{first}, then\ndlctl stop -j {snapshot.run_id}\n{start}"
    return f"{first}, then\ndlctl restart {whom} -j {snapshot.run_id}"


def _workers(snapshot: Snapshot) -> list[Row]:
    return [row for row in snapshot.daemons if row.get("role") == "worker"]


def _task_file(snapshot: Snapshot) -> str:
    """As in "train.py"; "the task" if that is not known."""
    job = read_job(snapshot.directory).get("job")
    task = job.get("task") if isinstance(job, Mapping) else None
    file = task.rpartition(":")[0] if isinstance(task, str) else ""
    return shlex.quote(values.path(Path(file))) if file else "the task"
