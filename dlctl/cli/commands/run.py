"""`dlctl run`: a job in the foreground. Ctrl-C stops it, saving; twice kills it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import file_argument, fresh_option
from dlctl.cli.ui import attention, console, live, log_lines, report
from dlctl.cli.ui.interrupts import Interrupted, Interrupts, caught
from dlctl.errors import JobFailed, NotRunning, TimedOut
from dlctl.ops import ready, stop
from dlctl.ops.recover import Launched
from dlctl.runs import logs
from dlctl.runs.logs import LEVELS, Line
from dlctl.runs.snapshot import Snapshot, load, read_job
from dlctl.util import values

SIGNALLED = 128
"""The exit code of a program terminated by a signal is this plus the signal's number."""


@make_command(
    "dlctl run job.toml  # train; Ctrl-C saves and stops",
    "dlctl run --fresh job.toml  # from the beginning, not from the last checkpoint",
    "dlctl run job.toml --progress plain  # lines instead of a bar, for log files",
)
@file_argument
@fresh_option
@click.pass_context
def command(ctx: click.Context, file: Path, fresh: bool) -> None:
    """Shows warnings and errors of all daemons, and the training progress. The exit code is that of
    the job: 0 if it has finished, 7 if it failed, 3 if another command stopped it, 130 after
    Ctrl-C. Ctrl-C saves a checkpoint and stops; a second one kills. The next start of the job
    resumes from that checkpoint.
    """
    from dlctl.ops import launch  # imported late: it pulls in numpy

    with caught() as interrupts:
        launched = launch.launch(file, fresh=fresh)
        if launched.process is None:
            console.commands(report.next_commands(load(launched.directory)))
            return
        try:
            with live.progress() as progress, interrupts.armed():
                snapshot = _attend(launched, progress)
        except (Interrupted, TimedOut) as end:
            late = ready.waiting_for(load(launched.directory))
            origin = signal.Signals(end.signal).name if isinstance(end, Interrupted) else "timeout"
            snapshot = _stop(launched.directory, interrupts, origin)
            _summary(snapshot)
            if isinstance(end, TimedOut):
                what = f"was not ready in time and was stopped; it waited for {late}"
                raise TimedOut(f"{snapshot.run_id} {what}") from None
            ctx.exit(SIGNALLED + end.signal)
    _summary(snapshot)
    if snapshot.state == "failed":
        raise JobFailed(
            f"{snapshot.run_id} failed: {snapshot.reason}{ready.quoted(snapshot)}",
            hint=f"dlctl logs --failed -j {snapshot.run_id}",
        )
    if snapshot.state != "finished":
        raise NotRunning(f"{snapshot.run_id} was {snapshot.state} before it had finished")


def _attend(launched: Launched, progress: live.Progress) -> Snapshot:
    """From the start to the end: show warnings as they arrive, and the progress."""
    directory = launched.directory
    names = list(load(directory).roles())
    printer, follower = log_lines.Printer(names), logs.Follower(directory, names)

    def show(lines: Iterable[Line]) -> None:
        for line in lines:
            # The final error reports the cause of the run's end.
            is_cause = bool(line.text) and line.text in snapshot.reason
            if line.severity >= LEVELS.index("warning") and not is_cause:
                progress.line(printer.text(line))

    snapshot = ready.wait_ready(launched, None, progress)
    while snapshot.is_live:
        lines = follower.poll()
        time.sleep(live.LOOK_S)
        snapshot = load(directory)
        show(lines)  # Delayed, so that the run's reason is known by now.
        progress.show(snapshot)
    snapshot = stop.settle(snapshot)
    show(follower.rest())
    return snapshot


def _stop(directory: Path, interrupts: Interrupts, origin: str) -> Snapshot:
    """Stop gracefully; kill on a second interrupt.

    `origin`: the source of the stop request, recorded in the run's reason.
    """
    for module in ("dlctl.control.client", "zmq"):
        import_module(module)  # A signal during an import would leave a partial module.
    snapshot, end = load(directory), partial(stop.stop, origin=origin)
    grace_s = values.number(read_job(directory).get("timeouts", {}).get("grace_s")) or 30.0
    console.note("\nstopping: last steps, then a checkpoint; Ctrl-C again kills at once")
    try:
        with interrupts.armed():
            if snapshot.is_live:
                end(snapshot, checkpoint=True, grace_s=grace_s, kill=False, tell=live.told)
    except Interrupted:
        console.note("\nkilling")
        now = load(directory)
        if now.is_live:
            end(now, checkpoint=False, grace_s=0.0, kill=True)
    return stop.settle(load(directory))


def _summary(snapshot: Snapshot) -> None:
    """Print the result (on stdout), the output of the task's `finish`, and the next commands."""
    found = snapshot.run.get("finish")
    printed = found.get("text") if isinstance(found, Mapping) else None
    finish = [console.escape_lines(printed)] if isinstance(printed, str) and printed else []
    head = [*report.head(snapshot), *attention.lines(snapshot, ())]
    console.out("\n".join([*head, *finish]), flush=True)
    console.commands(report.next_commands(snapshot))
