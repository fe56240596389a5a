"""`dlctl restart`: new processes under the same names, while the run continues."""

from __future__ import annotations

import click

from dlctl.cli import daemon_names
from dlctl.cli.group import make_command
from dlctl.cli.options import job_option, wait_options
from dlctl.cli.ui import console, live
from dlctl.errors import UsageError
from dlctl.ops import control, other_hosts
from dlctl.runs import facts, select, task_code
from dlctl.runs.snapshot import Snapshot, natural
from dlctl.util import values


@make_command(
    "dlctl restart worker-2  # also releases it from quarantine",
    "dlctl restart 'server-*'  # the new processes resume with their shards",
    "dlctl restart coordinator  # the daemons continue meanwhile",
)
@click.argument("names", nargs=-1, metavar="NAME...", shell_complete=daemon_names.complete)
@wait_options
@job_option
def command(names: tuple[str, ...], limit_s: float | None, no_wait: bool, job: str | None) -> None:
    """NAME is a daemon or a glob. A worker finishes its portion and its pushes first. A server
    resumes with its shard, so this needs durability = "process" or "disk". Agents and the
    coordinator recover their state. A restarted worker re-reads the task's files; a worker that
    replaces a dead one uses the files from the start of the run. Nothing that was acknowledged is
    lost. Returns when all are running.
    """
    if not names:
        raise UsageError("no daemon given to restart: give NAME...", hint="dlctl status")
    snapshot = select.look(job)
    control.require_live(snapshot, "restarted")
    chosen = daemon_names.match(names, (row["name"] for row in snapshot.everybody()))
    _take_new_code(snapshot, chosen)
    control.ask(snapshot, "restart", {"names": chosen})
    if no_wait:
        console.note(f"restarting {', '.join(chosen)}")
        return
    with live.progress() as progress:
        after = control.wait(snapshot, chosen, limit_s, "all restarted", progress)
    rows = []
    for name in chosen:
        old, new = (facts.incarnation(run.daemon(name)) for run in (snapshot, after))
        rows.append({"NAME": name, "INCARNATION": f"{old} -> {new}"})
    console.out(console.table(rows))


def _take_new_code(snapshot: Snapshot, chosen: list[str]) -> None:
    """Make restarted workers re-read the task's files, if all of them can."""
    workers = {str(row["name"]) for row in snapshot.daemons if row.get("role") == "worker"}
    changed = task_code.changed(snapshot.directory)
    if not changed or workers.isdisjoint(chosen):
        return
    files = ", ".join(map(values.path, changed))
    if other_hosts.have_copies(snapshot):
        console.warn(f"{files}: changed, but not reloaded on other hosts: dlctl stop, dlctl start")
        return
    task_code.forget(snapshot.directory)
    console.note(f"{files}: changed, reloading")
    if others := sorted(workers.difference(chosen), key=natural):
        console.warn(f"{', '.join(others)} continue with the old code until restarted as well")
