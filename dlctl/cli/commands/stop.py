"""`dlctl stop`: end a run in order, wait until it has ended, and leave no process behind."""

from __future__ import annotations

import click

from dlctl.cli.group import command as make_command
from dlctl.cli.options import job_option
from dlctl.cli.ui import console, report
from dlctl.cli.ui.live import Countdown
from dlctl.errors import DlctlError, Partial
from dlctl.ops import kept, next_step, other_hosts, stop, unreadable
from dlctl.runs import database, facts, lock, paths, select
from dlctl.runs.snapshot import Snapshot, load
from dlctl.util import values
from dlctl.util.text import KILLED, plural

GRACE = "30s"


@make_command(
    "stop",
    examples=[
        ("dlctl stop", "finish the steps, save a checkpoint, end all daemons"),
        ("dlctl stop --no-checkpoint", "the same without saving"),
        ("dlctl stop --grace 5s", "less time for the workers' last steps"),
        ("dlctl stop --kill", "at once; what was not saved is lost"),
    ],
    see_also=["start", "status"],
)
@click.option(
    "--grace", default=GRACE, metavar="TIME", help=f"For the workers' last steps ({GRACE})."
)
@click.option("--no-checkpoint", is_flag=True, help="Do not save before the end.")
@click.option("--kill", is_flag=True, help="End everything at once.")
@job_option
def command(grace: str, no_checkpoint: bool, kill: bool, job: str | None) -> None:
    """Stop a job, saving first.

    The workers finish their steps and last pushes, the servers save, then all daemons end. A
    stopped job goes on from its checkpoint with "dlctl start". Stopping a stopped job does nothing.
    If the coordinator and its agent have died, the daemons they left behind are ended; what the
    servers have kept stays, and "dlctl recover" goes on with it. --kill removes it, too. The
    exit code is 8 if the job has stopped, but steps are lost because its last checkpoint failed.
    """
    grace_s = values.parse_duration(grace, "--grace")
    directory = select.own_directory(job)
    snapshot = select.load_any(directory) if kill else select.read(directory)
    lock.require_own(snapshot)
    if snapshot.state == select.UNREADABLE or (kill and database.damage_of_log(directory)):
        _end_unreadable(snapshot)
        return
    if snapshot.is_live:
        save = not (no_checkpoint or kill)
        after = stop.stop(
            snapshot,
            checkpoint=save,
            grace_s=grace_s,
            kill=kill,
            tell=Countdown(None if kill else grace_s),
        )
        _tell(after)
        if after.state == "failed" and not kill:
            raise DlctlError(
                f"{after.run_id} has ended, but not in order: {after.reason}",
                hint=f"dlctl logs coordinator -j {after.run_id}",
            )
        if save:
            _require_saved(after)
        return
    left_s = 0.0 if kill else grace_s
    ended, away = stop.clean_up(snapshot, left_s), list[str]()
    if kill or snapshot.state == "failed":  # After an orderly end nothing is left there.
        away = other_hosts.end(snapshot, left_s, purge=kill)
    if kill and snapshot.is_gone:
        stop.record_end(snapshot.directory, "stopped", KILLED)
    if not ended and not away:
        text = f"{snapshot.run_id} has already ended ({snapshot.state}); no process of it is left"
        console.note(console.escape(text))
    _tell_kept(snapshot, kill)
    stop.require_reached(load(snapshot.directory), away)


def _end_unreadable(snapshot: Snapshot) -> None:
    """Whatever is found of a run whose database cannot be read. An agent that is still there may
    have started the next coordinator meanwhile: so twice.
    """
    for _ in range(2):
        rows = [found.row() for found in unreadable.living(snapshot.directory)]
        stop.end_processes(rows, snapshot.run_id, 0.0)
    paths.remove_sockets(snapshot.run_id)
    away = other_hosts.end(snapshot, 0.0, purge=True)
    _tell_kept(snapshot, kill=True)
    console.note(console.escape(f"no process of {snapshot.run_id} is left here"))
    stop.require_reached(snapshot, away)


def _tell_kept(snapshot: Snapshot, kill: bool) -> None:
    """What the servers of an ended run have left: how to go on with it, or that it is removed."""
    held = kept.shards(snapshot)
    if held and kill:
        kept.remove(snapshot)
        console.note(f"its kept state ({plural(held, 'shard')}) is removed")
    elif held:
        remove = f"dlctl stop --kill -j {snapshot.run_id} removes it"
        console.note(console.escape(f"its state ({plural(held, 'shard')}) is kept; {remove}"))
    step = None if kill else next_step.of(load(snapshot.directory))
    if step is not None:
        console.note(console.next_lines(step.text(), ""))


def _tell(snapshot: Snapshot) -> None:
    run_id, step = console.escape(snapshot.run_id), values.count(snapshot.run.get("step"))
    console.note(f"{run_id} {console.escape(snapshot.state)} at step {step}")
    row = snapshot.run.get("checkpoint")
    if isinstance(row, dict):
        console.note(f"checkpoint  {report.newest_checkpoint(snapshot)}")
        if text := report.without_residuals(row):
            console.warn(f"the checkpoint is {text}")
    if away := other_hosts.not_ended(snapshot):
        console.warn(
            f"{console.escape(', '.join(away))} could not be reached: what runs there ends by "
            f"itself within ten minutes, or with dlctl stop --kill -j {run_id}"
        )


def _require_saved(snapshot: Snapshot) -> None:
    """Say why a checkpoint that was wanted was not made.

    Raises Partial unless no worker had begun: then there was nothing to save.
    """
    error, row = snapshot.run.get("checkpoint_error"), snapshot.run.get("checkpoint")
    if error:
        why = f"the last checkpoint failed: {error}"
    elif isinstance(row, dict):
        return
    elif not facts.has_begun(snapshot):
        console.note("no checkpoint was made: the run stopped before training had begun")
        return
    else:
        why = "no checkpoint was made"
    raise Partial(
        f"{snapshot.run_id} has {snapshot.state}, but {why}\n{_what_is_left(snapshot)}",
        hint=f"dlctl events -j {snapshot.run_id}",
    )


def _what_is_left(snapshot: Snapshot) -> str:
    row = snapshot.run.get("checkpoint")
    if not isinstance(row, dict):
        return "there is no older checkpoint: the same job file trains anew"
    behind = f"{plural(facts.unsaved_steps(snapshot), 'step')} before the end"
    return f"the newest good checkpoint was saved at step {values.count(row.get('step'))}, {behind}"
