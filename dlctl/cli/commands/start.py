"""`dlctl start`: a job in the background; returns when it is ready."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import file_argument, fresh_option, from_option, wait_options
from dlctl.cli.ui import attention, console, live, log_lines, report
from dlctl.errors import UsageError
from dlctl.runs import select
from dlctl.runs.snapshot import load
from dlctl.util import values

if TYPE_CHECKING:
    from dlctl.launch.launcher import ControlPlace
    from dlctl.ops.cases import Start


@make_command(
    "dlctl start job.toml  # start it, or resume its last run",
    "dlctl start --fresh job.toml  # a new run from the beginning",
    "dlctl start --from runs/mnist-7f3a/ckpt/000000000400-2 job.toml  # from this checkpoint",
    "dlctl start --from s3://bucket/mnist job.toml  # from the newest one in a mirror",
    "dlctl start -f job.toml  # and follow its logs; Ctrl-C only detaches",
)
@file_argument
@fresh_option
@from_option
@wait_options
@click.option("-f", "--follow", is_flag=True, help="Follow the logs when it is ready.")
@click.pass_context
def command(
    ctx: click.Context,
    file: Path,
    fresh: bool,
    source: str | None,
    limit_s: float | None,
    no_wait: bool,
    follow: bool,
) -> None:
    """A stopped job resumes from its newest good checkpoint. A failed job resumes exactly where it
    stopped if all of its state survives, else from its newest good checkpoint. The start is refused
    if all checkpoints are damaged or the run's database cannot be read. If the job file has
    changed, the run resumes from its checkpoint, and the command reports how many steps are done
    again; without a checkpoint this is refused, because `dlctl recover` can resume with the
    previous job. Settings changed with `dlctl set` are kept and reported. A run whose job file no
    longer exists, as in a project that was moved, is not resumed: use --from. Starting a job that
    is already running does nothing. If a daemon fails during the start, the command shows its last
    lines, leaves nothing running, and exits with 7.

    With another [algorithm], [optimizer] or [inner] in the job file, a new run starts from the
    checkpoint of the last one: it keeps the model, the progress, and the state of adam, adamw or
    momentum, in the servers or in the replicas of allreduce. The command reports what starts over.

    With --from, a new run starts from a copy of another run's checkpoint, such as a run whose
    database is damaged: model, optimiser, residuals and data position are those of the checkpoint.
    It may be at an address, as a mirror of [checkpoints]: the newest good one there, or the one
    that the address names. If that is the mirror of this job, the new run takes it over.
    """
    from dlctl.ops import cases, elsewhere, launch, ready  # imported late: they pull in numpy
    from dlctl.stores import addresses

    if no_wait and follow:
        raise UsageError("--no-wait and --follow exclude each other")
    job = cases.read(file)
    if (place := elsewhere.of(job)) is not None:
        there = source and addresses.located(source, Path.cwd())
        words = ["--fresh"] * fresh + ([f"--from={there}"] if there else [])
        code = _begin_elsewhere(place, job, words, limit_s, no_wait=no_wait, follow=follow)
        ctx.exit(code)
    began = time.monotonic()
    launched = launch.launch_job(job, fresh=fresh, source=source)
    name = launched.directory.name
    if console.settings.quiet:
        console.out(name, flush=True)
    if no_wait:
        console.note(f"{name} is starting in the background")
        return
    with live.progress() as progress:
        try:
            snapshot = ready.wait_ready(launched, limit_s, progress)
        except KeyboardInterrupt:
            console.note("\nIt is still starting.")
            wait = (f"dlctl wait --for ready -j {name}", "wait for it")
            console.commands([wait, *report.next_commands(load(launched.directory))])
            raise
    if snapshot.state == "failed":
        raise ready.failed(launched, "failed soon after its start")
    if launched.process is not None:
        took, daemons = values.duration(time.monotonic() - began), len(snapshot.daemons)
        console.note(f"{name} is {snapshot.state} after {took}: {daemons} daemons")
        for advice in attention.advice(snapshot):
            console.warn(advice)
    console.commands(report.next_commands(snapshot))
    if follow and snapshot.is_live:
        names = list(snapshot.roles())
        log_lines.follow_logs(snapshot, names, 10, None, log_lines.Printer(names))


def _begin_elsewhere(
    place: ControlPlace, job: Start, words: list[str], limit_s: float | None, *, no_wait: bool,
    follow: bool,
) -> int:  # fmt: skip
    """The coordinator runs at the owner of the hosts: wait until it has started there; the exit
    code.
    """
    from dlctl.ops import elsewhere

    number = elsewhere.begin(place, job, words)
    if no_wait:
        return 0
    try:
        code, said = elsewhere.finish(place, number, console.note, limit_s)
    except KeyboardInterrupt:
        console.note(f"\nJob {number} stays: dlctl start waits for it again, scancel ends it.")
        raise
    console.note(said.rstrip())
    if code == 0 and console.settings.quiet:
        console.out(select.directory(str(job.file), quiet=True).name, flush=True)
    if code == 0 and follow:
        elsewhere.follow(place, number, job.file)
    return code
