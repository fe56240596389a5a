"""`dlctl logs`: the daemons' log files, merged by time and followed through restarts."""

from __future__ import annotations

import re
import sys

import click

from dlctl.cli import daemon_names
from dlctl.cli.group import make_command
from dlctl.cli.options import (
    follow_option,
    job_option,
    json_option,
    moment,
    since_option,
    tail_option,
)
from dlctl.cli.ui import console, log_lines
from dlctl.errors import NotFound, UsageError
from dlctl.runs import logs, select
from dlctl.runs.logs import Line, LogFile
from dlctl.runs.snapshot import GONE, WITHOUT_PROCESS, Snapshot

TAIL = 100
TAIL_OF_FAILED = 40


@make_command(
    "dlctl logs  # the last 100 lines of each daemon",
    "dlctl logs -f  # and new lines, until the job ends",
    "dlctl logs worker-1 --previous  # what it wrote before it was restarted",
    "dlctl logs --failed  # last lines of unhealthy daemons, and how they ended",
    "dlctl logs 'worker-*' -l warning -g loss  # filter by level and text",
)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=daemon_names.complete)
@follow_option
@tail_option('Last N lines of each daemon, or "all" (100; with --since: all).')
@since_option
@click.option("--until", type=moment, metavar="TIME", help="Only lines until this time.")
@click.option(
    "-l", "--level", type=click.Choice(logs.LEVELS), help="Only lines of this severity or higher."
)
@click.option("-g", "--grep", metavar="REGEX", help="Only lines that match REGEX.")
@click.option("--role", "roles", multiple=True, metavar="ROLE", help="Only daemons of this role.")
@click.option("-p", "--previous", is_flag=True, help="The incarnation before this one.")
@click.option("--failed", is_flag=True, help="Last lines of dead or unhealthy daemons, 40 each.")
@click.option("--raw", is_flag=True, help="Unformatted lines, as in the files.")
@job_option
@json_option
def command(
    names: tuple[str, ...],
    follow: bool,
    tail: int | None,
    since: float | None,
    until: float | None,
    level: str | None,
    grep: str | None,
    roles: tuple[str, ...],
    previous: bool,
    failed: bool,
    raw: bool,
    job: str | None,
) -> None:
    """NAME is a daemon or a glob. Lines are merged by time; restarts are marked. What a worker or
    its child processes have printed has "stream=stdout" or "stream=stderr". A progress bar gives a
    line each 10 s. Of more than 4 MiB/s the rest is dropped, and a warning counts its lines. A line
    of the level "text" is direct output of another daemon (a traceback, a library's warning) and
    has no time.

    With --failed, for each daemon that failed, is stuck, or whose heartbeat is late: its last
    lines, and below them the problem, as "dlctl status" shows it. Evaluations of the model are left
    out.
    """
    if follow and (previous or failed):
        raise UsageError("--follow shows new lines; --previous and --failed show past ones")
    snapshot = select.look(job, is_any=not failed)
    files, known = logs.list_files(snapshot.directory), snapshot.roles()
    known = {**{name: name.partition("-")[0] for name in files}, **known}
    chosen = [
        name for name in daemon_names.match(names, known) if not roles or known[name] in roles
    ]
    if not chosen:
        raise NotFound(f"no such daemon has the role {' or '.join(roles)}")
    least = logs.LEVELS.index(level) if level else 0
    try:
        search = re.compile(grep or "").search
    except re.error as error:
        raise UsageError(f"--grep: {error}") from None

    def wanted(line: Line) -> bool:
        is_then = (since or 0.0) <= line.at <= (until or sys.maxsize)
        return is_then and line.severity >= least and bool(search(line.text))

    # Without a filter, the last lines are read from the end of the files.
    test = None if (level, since, until, grep) == (None,) * 4 else wanted
    shape = "json" if console.settings.json else "raw" if raw else "text"
    printer = log_lines.Printer(chosen, shape)
    if tail is None:
        tail = TAIL_OF_FAILED if failed else TAIL if since is None else sys.maxsize
    if failed:
        log_lines.show_failed(snapshot, chosen, tail, test, printer)
        return
    if follow:
        log_lines.follow_logs(snapshot, chosen, tail, test, printer)
        return
    lines = list[Line]()
    for name in chosen:
        own = files.get(name, [])
        own = _previous(snapshot, name, own) if previous else own
        lines += logs.tail(own, tail, test)
    printer.show(logs.in_order(lines))


def _previous(snapshot: Snapshot, name: str, files: list[LogFile]) -> list[LogFile]:
    """The incarnation before the current one; for a dead daemon, the one that ended last."""
    incarnations, row = {file.incarnation for file in files}, snapshot.daemon(name)
    if snapshot.is_live and row.get("state") not in (*WITHOUT_PROCESS, GONE):
        now = row.get("incarnation", max(incarnations, default=0))
        incarnations = {number for number in incarnations if number < now}
    if not incarnations:
        raise NotFound(
            f"{name} was never restarted: it has no previous incarnation",
            hint=f"dlctl logs {name} -j {snapshot.run_id}",
        )
    return [file for file in files if file.incarnation == max(incarnations)]
