"""`dlctl run`: a job in the foreground. Ctrl-C stops it, saving; twice kills it."""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import file_argument, fresh_option, from_option
from dlctl.cli.ui import attention, console, live, log_lines, report
from dlctl.cli.ui.interrupts import Interrupted, Interrupts, caught
from dlctl.errors import JobFailed, NotRunning, TimedOut, UsageError
from dlctl.ops import next_step, ready, stop
from dlctl.ops.recover import Launched
from dlctl.problems import names_in
from dlctl.runs import logs
from dlctl.runs.logs import LEVELS, Line
from dlctl.runs.snapshot import Snapshot, load, read_job
from dlctl.util import values

SETTLED_S = 3.0
"""After a worker has raised an error, the run ends within this time, or goes on."""
EARLY_LINES = 100
"""Of each daemon, at most, that are older than the look at its log."""
SIGNALLED = 128
"""The exit code of a program terminated by a signal is this plus the signal's number."""


@make_command(
    "dlctl run job.toml  # train; Ctrl-C saves and stops",
    "dlctl run --fresh job.toml  # from the beginning, not from the last checkpoint",
    "dlctl run job.toml --progress plain  # lines instead of a bar, for log files",
)
@file_argument
@fresh_option
@from_option
@click.pass_context
def command(ctx: click.Context, file: Path, fresh: bool, source: str | None) -> None:
    """Shows warnings and errors of all daemons, and the training progress. The exit code is that of
    the job: 0 if it has finished, 7 if it failed, 3 if another command stopped it, 130 after
    Ctrl-C. Ctrl-C saves a checkpoint and stops; a second one kills. The next start of the job
    resumes from that checkpoint.
    """
    from dlctl.ops import cases, elsewhere, launch  # imported late: they pull in numpy

    job = cases.read(file)
    if elsewhere.of(job) is not None:
        raise UsageError(
            "the coordinator of this job is a job of its own, which no terminal holds",
            hint=f"dlctl start {values.path(file)}, then dlctl wait",
        )

    began = time.time()
    with caught() as interrupts:
        launched = launch.launch_job(job, fresh=fresh, source=source)
        if launched.process is None:
            console.commands(report.next_commands(load(launched.directory)))
            return
        try:
            with live.progress() as progress, interrupts.armed():
                snapshot = _attend(launched, progress, began)
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
            hint=next_step.command(snapshot),
        )
    if snapshot.state != "finished":
        raise NotRunning(f"{snapshot.run_id} was {snapshot.state} before it had finished")


def _attend(launched: Launched, progress: live.ProgressLines, began: float) -> Snapshot:
    """Follow a run from start to end: show warnings as they arrive, and the progress. began: when
    this command did, in seconds since 1970: later lines may be there already.
    """
    directory = launched.directory
    names = list(load(directory).roles())
    printer, follower = log_lines.Printer(names), logs.Follower(directory, names)
    waiting: deque[tuple[float, Line]] = deque()
    """Each with the time from which on it is shown: by then the reason of an end is known."""

    def show(lines: Iterable[Line], until: float = math.inf) -> None:
        warnings = [line for line in lines if line.severity >= LEVELS.index("warning")]
        waiting.extend((time.monotonic() + SETTLED_S, line) for line in warnings)
        while waiting and waiting[0][0] <= until:
            line = waiting.popleft()[1]
            if not _is_cause(line, snapshot):
                progress.line(printer.text(line))

    early = [line for line in follower.past(EARLY_LINES, None) if line.at >= began]
    snapshot = ready.wait_ready(launched, None, progress)
    show(early, time.monotonic())
    try:
        while snapshot.is_live:
            lines = follower.poll()
            time.sleep(live.LOOK_S)
            snapshot = load(directory)
            show(lines, time.monotonic())
            progress.show(snapshot)
        snapshot = stop.settle(snapshot)
        show(follower.rest())
    finally:  # Ctrl-C does not lose what is waiting.
        show(())
    return snapshot


def _is_cause(line: Line, snapshot: Snapshot) -> bool:
    """Whether the error that ends a failed run's command says this as well: the error of a daemon,
    as itself or the coordinator reported it, or that its process has ended.
    """
    if snapshot.state not in ("stopping", "failed"):
        return False  # The reason of a degraded run names daemons, too.
    daemon, _, words = line.text.partition(": ")
    about = daemon.removesuffix(" ended")
    is_blamed = about in names_in(snapshot.reason)
    text = words if is_blamed else line.text
    return (is_blamed and about != daemon) or (bool(text) and text in snapshot.reason)


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
                end(snapshot, checkpoint=True, grace_s=grace_s, kill=False, tell=live.note_progress)
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
    # The error that follows has the reason of a failure, and the next step.
    has_failed = snapshot.state == "failed"
    shown = replace(snapshot, reason="") if has_failed else snapshot
    head = [*report.head(shown), *attention.lines(snapshot, (), has_next=not has_failed)]
    console.out("\n".join([*head, *finish]), flush=True)
    console.commands(report.next_commands(snapshot))
