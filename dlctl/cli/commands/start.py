"""`dlctl start`: a job in the background; returns when it is ready."""

from __future__ import annotations

import time
from pathlib import Path

import click

from dlctl.cli.group import command as make_command
from dlctl.cli.options import Duration
from dlctl.cli.ui import console
from dlctl.errors import UsageError
from dlctl.runs.snapshot import Snapshot
from dlctl.util import values


@make_command(
    "start",
    examples=[
        ("dlctl start job.toml", "start it, or go on with its last run"),
        ("dlctl start --fresh job.toml", "a new run from the beginning"),
        (
            "dlctl start --from runs/mnist-7f3a/ckpt/000000000400-2 job.toml",
            "a new run that goes on from there",
        ),
        ("dlctl start -f job.toml", "and follow its logs; Ctrl-C only leaves"),
    ],
    see_also=["plan", "doctor", "run", "status", "stop"],
)
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--fresh", is_flag=True, help="Begin a new run even if one could be resumed.")
@click.option(
    "--from",
    "source",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Begin a new run with this checkpoint, of whatever run.",
)
@click.option(
    "--timeout", "limit_s", type=Duration(), help='Give up waiting after "90s", "5m" (exit code 6).'
)
@click.option("-d", "--no-wait", is_flag=True, help="Return at once, before it is ready.")
@click.option("-f", "--follow", is_flag=True, help="Follow the logs when it is ready.")
def command(
    file: Path,
    fresh: bool,
    source: Path | None,
    limit_s: float | None,
    no_wait: bool,
    follow: bool,
) -> None:
    """Start a job in the background; wait until it is ready.

    A job that was stopped goes on from its newest good checkpoint. One that has failed goes on
    exactly where it was, if all of that is still there, and else from its newest good checkpoint;
    if all checkpoints are damaged, or the run's database cannot be read, it is refused. With a job
    file that was changed meanwhile it takes its checkpoint, and how many steps are done again is
    said; without any checkpoint that is refused, for `dlctl recover` goes on with the job as it
    was. What `dlctl set` has changed stays so, and is said; a key that was changed in the job file
    since the last start counts as the job file says. A run whose job file is not there any more, as
    in a project that was moved, is not gone on with: --from is the way. Starting a job that runs
    already does nothing. If a daemon fails while the job starts, its last lines are shown, nothing
    is left running, and the exit code is 7.

    With another [algorithm], [optimizer] or [inner] in the job file a new run begins with the
    checkpoint of the last one: its model and its progress go on, and so does what adam, adamw or
    momentum keep, in the servers or in the replicas of allreduce. What begins afresh is said.

    With --from a new run begins with a checkpoint of another one, such as a run whose database is
    damaged: model, optimiser, residuals and the data that is done are those of the checkpoint, of
    which a copy is made. It may be of another method or optimiser, likewise.
    """
    from dlctl.cli.ui import live, log_lines
    from dlctl.ops import launch, ready

    if no_wait and follow:
        raise UsageError("--no-wait and --follow exclude each other")
    began = time.monotonic()
    launched = launch.launch(file, fresh=fresh, source=source)
    if console.is_quiet():
        console.out(launched.directory.name, flush=True)
    if no_wait:
        console.note(f"{console.escape(launched.directory.name)} starts in the background")
        return
    progress = live.open_progress()
    try:
        snapshot = ready.wait_ready(launched, limit_s, progress)
    except KeyboardInterrupt:
        progress.close()
        job = f"-j {console.escape(launched.directory.name)}"
        console.note(
            f"\nIt goes on starting.  again: dlctl wait --for ready {job}   stop: dlctl stop {job}"
        )
        raise
    finally:
        progress.close()
    if snapshot.state == "failed":
        raise ready.failed(launched, "failed soon after its start")
    if launched.process is not None:
        took, daemons = values.duration(time.monotonic() - began), len(snapshot.daemons)
        text = f"{snapshot.run_id} is {snapshot.state} after {took}: {daemons} daemons"
        console.note(console.escape(text))
    _tell(snapshot)
    if follow and snapshot.is_live:
        names = list(snapshot.roles())
        log_lines.follow_logs(snapshot, names, 10, None, log_lines.Printer(names))


def _tell(snapshot: Snapshot) -> None:
    """What to type next."""
    job = f"-j {snapshot.run_id}"
    if snapshot.is_live:
        more = [(f"dlctl logs -f {job}", "follow it"), (f"dlctl stop {job}", "stop it")]
    else:
        more = [(f"dlctl checkpoint export {job}", "the model for torch")]
    console.commands([(f"dlctl status {job}", "how it goes"), *more])
