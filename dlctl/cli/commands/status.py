"""`dlctl status`: one run in detail, from its database alone; it needs no running daemon."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import click

from dlctl.cli import daemon_names
from dlctl.cli.group import make_command
from dlctl.cli.options import PATH, job_option, json_option
from dlctl.cli.ui import attention, console, remote_status, report, tables
from dlctl.errors import NotRunning, UsageError
from dlctl.ops import problems
from dlctl.runs import database, facts, select, work_times
from dlctl.runs.snapshot import Snapshot, load
from dlctl.util import values

RECENT_EVENTS = 10


@make_command(
    "dlctl status  # the running job, or the newest one",
    "dlctl status 'worker-*' --wide  # some daemons, with all columns and recent events",
    "dlctl status --watch  # refresh every 2 seconds",
    "dlctl status --check  # for scripts: exit code 3 unless the job is healthy",
    "dlctl status --json | jq .loss  # for programs",
    "dlctl status --key ann.key  # a run of ann, who sent us this file",
)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=daemon_names.complete)
@click.option("--wide", is_flag=True, help="Also show host, loss, memory, intervals and latencies.")
@click.option("--check", is_flag=True, help="Exit with 3 unless the job is running and healthy.")
@click.option(
    "-w",
    "--watch",
    "every_s",
    type=click.FloatRange(0.1, 3600),
    is_flag=False,
    flag_value=2.0,
    metavar="[SEC]",
    help="Refresh every SEC seconds (2) until the job ends.",
)
@click.option(
    "--key", "key_file", metavar="FILE", type=PATH, help='Query with a file of "dlctl keys reader".'
)
@click.option("--from", "address", metavar="ADDRESS", help="With --key: tcp://HOST:PORT.")
@job_option
@json_option
def command(
    names: tuple[str, ...],
    wide: bool,
    check: bool,
    every_s: float | None,
    key_file: Path | None,
    address: str | None,
    job: str | None,
) -> None:
    """The step in the first line is the total of all workers; steps count once their portion of the
    data is done, i.e. pushed and acknowledged. STEP of a worker counts the steps of its process,
    pushed or not, from 0 after a restart. STEP of a server is its version (v): the number of
    applied updates. STALE is the mean staleness of a worker's pushes: updates by others between its
    fetch and its push. PUSH and FETCH are the current bytes per second, and the limit if there is
    one. PUSH EVERY and FETCH EVERY are the steps between two pushes or fetches; "auto (8)": the
    worker chooses them, currently 8. They are shown if a worker does, and with --wide. WAITS is the
    share of its time that a worker is blocked on pushes and fetches. RST counts restarts. "-" means
    that there is no current value. "times" in --json says where the time of each daemon goes, by
    the kind of its work and of the events that it handled, every 15 seconds. Above the table: with
    several hosts the bytes of pushes and fetches over the link of each, out of it and into it,
    without those within the host ("links" in --json); and the parts of the model that the servers
    have, if they are unequal. Below the table:
    the problems, with their codes ("dlctl explain"), and the next command.
    """
    if key_file is not None:
        if names or wide or check or every_s is not None or job is not None:
            raise UsageError("--key goes with --from and --json only", hint="dlctl status --help")
        remote_status.show(key_file, address)
        return
    if address is not None:
        raise UsageError("--from needs --key FILE", hint="its owner creates it: dlctl keys reader")
    snapshot = select.look(job)
    while True:
        _show(snapshot, names, wide, clear=every_s is not None and console.is_tty())
        if every_s is None or not snapshot.is_live:
            break
        try:
            time.sleep(every_s)
        except KeyboardInterrupt:
            return
        snapshot = load(snapshot.directory)
    if check and (why := attention.unwell(snapshot)):
        raise NotRunning(why)


def _show(snapshot: Snapshot, names: Sequence[str], wide: bool, *, clear: bool) -> None:
    everybody = {str(row["name"]): row for row in snapshot.everybody()}
    chosen = daemon_names.match(names, everybody)
    rows = [everybody[name] for name in chosen]
    found = [problems.as_data(snapshot, p) for p in problems.found(snapshot)]
    data = report.as_data(snapshot) | values.timed({"daemons": rows, "problems": found})
    data["times"] = {
        name: times for name, times in work_times.as_data(snapshot.directory).items()
        if name in chosen
    }  # fmt: skip
    lines = [*report.head(snapshot), tables.table(snapshot, rows, wide=wide)]
    lines += attention.lines(snapshot, rows)
    if names:
        with closing(database.RunDb(snapshot.directory, readonly=True)) as db:
            recent = [event for event in db.events() if facts.is_about(event, chosen)]
        shown = [f"  {report.event(event, snapshot.now)}" for event in recent[-RECENT_EVENTS:]]
        lines += ["recent events", *shown] if shown else []
    text = ("\x1b[H\x1b[2J" if clear else "") + "\n".join(lines)
    console.show("dlctl.status/1", data, text, chosen)
    console.flush()
