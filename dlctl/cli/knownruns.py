"""The runs that this user knows: those in ./runs, and those in the index of all that were started.

One broken database must not hide all other runs, and a copy of a run's directory not the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dlctl.cli import belonging
from dlctl.cli.snapshot import Snapshot, Unreadable, load, read_job, started
from dlctl.errors import DlctlError
from dlctl.runs import paths

UNREADABLE = "unreadable"
"""State of a run whose database cannot be read."""


def directories() -> list[Path]:
    """Of all runs, the last started one last."""
    here = Path("runs")
    local = [d.resolve() for d in here.iterdir() if paths.is_run(d)] if here.is_dir() else []
    return sorted({*local, *paths.all_runs()}, key=lambda d: (started(d), d.name, d))


def nearest() -> list[Snapshot]:
    """Those in ./runs; all, if none is there: who works in a project means its runs, and must not
    end those of another one. Copies are among them only if there is nothing else.
    """
    found = directories()
    if here := without_copies(all_of(filter(is_here, found))):
        return here
    everywhere = all_of(found)
    return without_copies(everywhere) or everywhere


def is_here(directory: Path) -> bool:
    return directory.parent == Path("runs").resolve()


def load_any(directory: Path) -> Snapshot:
    """A run; of one that cannot be read only what is known without its database, as `UNREADABLE`.

    Raises NotFound if `directory` is no run.
    """
    try:
        return load(directory)
    except Unreadable as error:
        job = read_job(directory)
        known = {"name": _name(job.get("job")), "algorithm": _name(job.get("algorithm"))}
        run = {key: value for key, value in known.items() if isinstance(value, str)}
        return Snapshot(directory, run, [], UNREADABLE, error.message, False, time.time())


def _name(section: Any) -> Any:
    return section.get("name") if isinstance(section, dict) else None


def all_of(directories: Iterable[Path]) -> list[Snapshot]:
    """The same of all that are runs."""
    found = []
    for directory in directories:
        try:
            found.append(load_any(directory))
        except DlctlError:
            continue
    return found


def without_copies(snapshots: Iterable[Snapshot]) -> list[Snapshot]:
    """Those that nobody knows to be a copy of another one: the processes of a copy are the
    original's, and no command can do anything for it that it cannot do for the original.
    """
    return [snapshot for snapshot in snapshots if not belonging.is_copy(snapshot)]


def job_file(path: Path) -> str:
    """How a job file is known: a link keeps its own name, because the task lies beside it."""
    return str(path.parent.resolve() / path.name)


def of_job(file: str, name: str) -> list[Snapshot]:
    """All runs of the job `name` in this file (see `job_file`), the last started one last.

    "dlctl start" takes that one up again.
    """
    wanted = {"job_file": file, "name": name}
    same = [s for s in all_of(directories()) if {key: s.run.get(key) for key in wanted} == wanted]
    return without_copies(same)
